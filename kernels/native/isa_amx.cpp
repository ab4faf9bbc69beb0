// AMX tiles for products, AVX-512 with BF16 and VNNI for the rest (Sapphire Rapids on).
#define FT_AVX2 0
#define FT_BF16 1
#define FT_VNNI 1
#define FT_AMX 1
#define FT_TABLE amx_kernels
#include "isa_table.h"
