/* Included ahead of ggml's AMX kernels when GCC compiles them.
 *
 * GCC's intrinsics for tile loads do not say which memory they read: of a tile configuration only its first 8 bytes, of
 * a tile nothing. So the stores that fill them may be dropped, and GCC 12 does drop them: the first product with more
 * than one row then ends in a general protection fault. These say it. */
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

static inline void dflash_tile_loadconfig(const void * config) {
    __asm__ volatile("ldtilecfg\t%X0" ::"m"(*static_cast<const char (*)[64]>(config)) : "memory");
}

#define _tile_loadconfig(config) dflash_tile_loadconfig(config)

#undef _tile_loadd
#define _tile_loadd(tile, base, stride) dflash_tile_loadd(tile, base, stride)
#define dflash_tile_loadd(tile, base, stride)                                                                          \
    __asm__ volatile("{tileloadd\t(%0,%1,1), %%tmm" #tile "|tileloadd\t%%tmm" #tile ", [%0+%1*1]}"                     \
                     : /* the tile is no operand */                                                                    \
                     : "r"(static_cast<const void *>(base)), "r"(static_cast<long>(stride))                            \
                     : "memory")

#endif
