/* A load whose address is the result of the one before cannot start early. */

#include <stdint.h>

#ifdef _WIN32
__declspec(dllexport)
#endif
int64_t follow(const int64_t *chain, int64_t at, int64_t steps)
{
    while (steps-- > 0)
        at = chain[at];
    return at;
}
