// AVX-512 with BF16 and VNNI (Cooper Lake, Zen 4 on).
#define FT_AVX2 0
#define FT_BF16 1
#define FT_VNNI 1
#define FT_AMX 0
#define FT_TABLE avx512_bf16_kernels
#include "isa_table.h"
