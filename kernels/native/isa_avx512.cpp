// AVX-512 F, BW, DQ, VL (Skylake-X on): bfloat16 and int8 products are built from wider ones.
#define FT_AVX2 0
#define FT_BF16 0
#define FT_VNNI 0
#define FT_AMX 0
#define FT_TABLE avx512_kernels
#include "isa_table.h"
