// AVX2 with FMA (Haswell on, and all of AMD's Zen): vectors of two registers each.
#define FT_AVX2 1
#define FT_BF16 0
#define FT_VNNI 0
#define FT_AMX 0
#define FT_TABLE avx2_kernels
#include "isa_table.h"
