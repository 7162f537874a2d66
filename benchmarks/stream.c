/* Copy and triad with ordinary stores: a line is read, then overwritten. */

#include <stdint.h>

#ifdef _WIN32
#define SHOWN __declspec(dllexport)
#else
#define SHOWN
#endif

/* A compiler that sees a plain copy calls memcpy, whose stores pass the cache
   by where a block is large: mask, 0, keeps it from knowing. */
SHOWN void copy(
    uint32_t *restrict a, const uint32_t *restrict b, int64_t n, uint32_t mask)
{
    for (int64_t i = 0; i < n; i++)
        a[i] = b[i] ^ mask;
}

SHOWN void triad(
    float *restrict a, const float *restrict b, const float *restrict c,
    int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++)
        a[i] = b[i] + scale * c[i];
}
