/* For processors with AVX-512. A file of its own: two builds at once would write one object file. */
#define NAME _kernels_avx512
#include "kernels.c"
