/* Included ahead of ggml's AMX kernels, amx/mmq.cpp. It mends three things without touching them.
 *
 * GCC's intrinsics for tile loads do not say which memory they read: of a tile configuration only its first 8 bytes, of
 * a tile nothing. So the stores that fill them may be dropped, and GCC 12 does drop them: the first product with more
 * than one row then ends in a general protection fault. Here they say it.
 *
 * The kernels configure the tiles of a thread once. Another library that uses tiles on this thread may have released
 * them since, and the next tile instruction ends the process. Here each product configures them again.
 *
 * Matrices are packed by OpenMP's threads, whatever their number is for products. A process that was forked has none of
 * them and would wait for ever when it opens a model. Without OpenMP, which nothing else in this file uses, the threads
 * are made for each matrix and joined. */
#pragma once

#undef GGML_USE_OPENMP

/* Products of few rows go to amx_few_rows.cpp first. */
#define ggml_backend_amx_mul_mat dflash_stock_amx_mul_mat

#if defined(__AMX_TILE__) && defined(__GNUC__)

#include <immintrin.h>

#include <cstring>

namespace {

struct dflash_tile_config {
    char bytes[64];
};
thread_local dflash_tile_config dflash_tiles;

/* The kernels' own function, which is in their unnamed namespace, under another name: it fills dflash_tiles the first
 * time. */
inline void dflash_first_tile_config(void);

inline void dflash_use_tiles() {
    dflash_first_tile_config();
    __asm__ volatile("ldtilecfg\t%0" ::"m"(dflash_tiles));
}

} // namespace

#define _tile_loadconfig(config) std::memcpy(&dflash_tiles, config, sizeof(dflash_tiles))

/* Its definition has "void" between the parentheses, its calls have nothing. */
#define ggml_tile_config_init(parameters) dflash_tile_config_##parameters
#define dflash_tile_config_void dflash_first_tile_config(void)
#define dflash_tile_config_ dflash_use_tiles()

#if !defined(__clang__)
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) dflash_tile_loadd(tile, base, stride)
#define dflash_tile_loadd(tile, base, stride)                                                                          \
    __asm__ volatile("{tileloadd\t(%0,%1,1), %%tmm" #tile "|tileloadd\t%%tmm" #tile ", [%0+%1*1]}"                     \
                     : /* the tile is no operand */                                                                    \
                     : "r"(static_cast<const void *>(base)), "r"(static_cast<long>(stride))                            \
                     : "memory")
#endif

#endif
