/* For processors with AVX2. A file of its own: two builds at once would write one object file. */
#define NAME _kernels_avx2
#include "kernels.c"
