// AVX-512 with VNNI (Cascade Lake and Ice Lake on): int8 products have an instruction, bfloat16 ones are built from float ones.
#define FT_AVX2 0
#define FT_BF16 0
#define FT_VNNI 1
#define FT_AMX 0
#define FT_TABLE avx512_vnni_kernels
#include "isa_table.h"
