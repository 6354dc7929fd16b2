/*
 * dflash.h: the C interface of pydflash's native engine (C99, usable from C++).
 *
 * Conventions
 *   Status      A function that can fail returns a dflash_status and takes a dflash_error as its last argument. On
 *               failure outputs are NULL or 0 and the object is unchanged, unless the function says that it poisons it.
 *   Errors      dflash_error belongs to the caller and may be NULL. It is filled on failure and untouched on success.
 *   Text        UTF-8 and NUL-terminated. Input text is copied if it is kept; output text goes to the caller's buffer.
 *   Integers    Token ids are int32_t; positions and counts are int64_t, ranges are half-open [begin, end); sizes of
 *               memory are uint64_t bytes.
 *   Threads     Each function is marked "any thread" or "one thread at a time per handle". A second thread that enters
 *               a busy handle gets DFLASH_STATUS_BUSY. A handle used in the child after fork() gives
 *               DFLASH_STATUS_INVALID.
 *   Versions    Each declaration says since which ABI version it exists. Nothing is removed or renumbered.
 */
#ifndef DFLASH_H
#define DFLASH_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#if defined(DFLASH_BUILD)
#define DFLASH_API __declspec(dllexport)
#else
#define DFLASH_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define DFLASH_API __attribute__((visibility("default")))
#else
#define DFLASH_API
#endif

/* Initialiser of a dflash_error: `dflash_error err = DFLASH_ERROR_INIT;` */
#define DFLASH_ERROR_INIT {sizeof(dflash_error), 0, {0}}

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: begin. Between the two marks: no macros but DFLASH_API and integer constants. The Python binding reads it. */

/* Version of this interface. Compare with dflash_abi_version() before any other call. */
#define DFLASH_ABI_VERSION 1

/* ---- Status and errors -------------------------------------------------------------------------------- since: 1 */

typedef enum dflash_status {
    DFLASH_STATUS_OK = 0,
    DFLASH_STATUS_INVALID = -1,     /* a bad argument: NULL, out of range, a closed or foreign handle */
    DFLASH_STATUS_OOM = -2,         /* host or device memory could not be allocated */
    DFLASH_STATUS_CANCELLED = -3,   /* a cancel request or a callback stopped the call */
    DFLASH_STATUS_NOT_FOUND = -4,   /* no such file, device, key or item */
    DFLASH_STATUS_FORMAT = -5,      /* a file is damaged or not what its type says */
    DFLASH_STATUS_UNSUPPORTED = -6, /* well-formed, but not something this build can run */
    DFLASH_STATUS_MISMATCH = -7,    /* belongs to another model, cache or shape */
    DFLASH_STATUS_CAPACITY = -8,    /* the context, ring or buffer is too small */
    DFLASH_STATUS_BUSY = -9,        /* another thread is inside this handle, or its memory is pinned */
    DFLASH_STATUS_POISONED = -10,   /* an earlier failure left the handle unusable: only free it */
    DFLASH_STATUS_DEVICE = -11,     /* the device or its driver failed */
    DFLASH_STATUS_INTERNAL = -99    /* a defect of this library */
} dflash_status;

/* Filled by a failing call. Set struct_size to sizeof(dflash_error) first (0 counts as the size of ABI version 1). */
typedef struct dflash_error {
    uint32_t struct_size;
    int32_t status;     /* a dflash_status */
    char message[1016]; /* one line; names the value and the limit; cut at a character boundary if too long */
} dflash_error;

/* The name of a status without its prefix, e.g. "CAPACITY"; "UNKNOWN" for any other number. Static text. Any thread. */
DFLASH_API const char * dflash_status_name(int32_t status);

/* ---- Versions ----------------------------------------------------------------------------------------- since: 1 */

/* The DFLASH_ABI_VERSION that the library was compiled with. Any thread. */
DFLASH_API int32_t dflash_abi_version(void);

/* The release of the library, "major.minor.patch". Static text. Any thread. */
DFLASH_API const char * dflash_version(void);

/* ---- Log ---------------------------------------------------------------------------------------------- since: 1 */

typedef enum dflash_log_level {
    DFLASH_LOG_DEBUG = 0,
    DFLASH_LOG_INFO = 1,
    DFLASH_LOG_WARNING = 2,
    DFLASH_LOG_ERROR = 3
} dflash_log_level;

/*
 * Takes the oldest waiting log line. The library never writes to standard output or standard error: lines wait in a
 * queue of 1,024 until they are taken; when it is full the oldest is dropped, and a line tells how many were.
 *   level   its dflash_log_level; may be NULL
 *   buffer  receives the text and a terminating NUL; may be NULL when size is 0
 *   size    bytes in buffer
 *   needed  bytes the line needs, NUL included; 0 when none waits; may be NULL
 * OK: the line was copied and removed. NOT_FOUND: none waits. CAPACITY: the buffer is too small, the line still waits.
 * INVALID: buffer is NULL and size is not 0. Any thread.
 */
DFLASH_API dflash_status dflash_log_take(int32_t * level, char * buffer, uint64_t size, uint64_t * needed);

/* ---- Ownership ----------------------------------------------------------------------------------------------------
 *   thing                                  made by                    freed by       lives while
 *   gguf                                   dflash_gguf_open           its free       no other object needs it
 *   target_model                           dflash_target_model_open   its free       caches and drafters hold it
 *   target_cache                           dflash_target_cache_new    its free       keeps its model alive
 *   draft_model                            dflash_draft_model_open    its free       keeps its target model alive
 *   draft_context, draft_feature_mirror    ..._new                    own free       keep their model or device alive
 *   prefix_snapshot                        ..._take, ..._import       its free       its deltas keep it alive
 *   decoder                                dflash_decoder_new         its free       keeps cache, context, mirror alive
 *   arrays, strings, options, dflash_error caller                     caller         the call only
 *   callback and user pointer              caller                     caller         the call that received them
 * Handles may be freed in any order. Every ..._free takes NULL and closed handles.
 */

typedef struct dflash_gguf dflash_gguf;
typedef struct dflash_target_model dflash_target_model;
typedef struct dflash_target_cache dflash_target_cache;
typedef struct dflash_draft_model dflash_draft_model;
typedef struct dflash_draft_context dflash_draft_context;
typedef struct dflash_draft_feature_mirror dflash_draft_feature_mirror;
typedef struct dflash_prefix_snapshot dflash_prefix_snapshot;
typedef struct dflash_decoder dflash_decoder;

/* Called on the thread of the call that received it. A return value other than 0 cancels. */
typedef int32_t (*dflash_progress_fn)(int64_t done, int64_t total, void * user);

/* ---- Devices ------------------------------------------------------------------------------------------ since: 1 */

typedef struct dflash_device_info {
    char name[64]; /* "CPU", "CUDA0", ... */
    char description[128];
    char kind[16];        /* "cpu", "gpu", "igpu", "accel", "meta" */
    uint64_t memory_free; /* bytes */
    uint64_t memory_total;
} dflash_device_info;

/* Fills up to capacity entries and sets *n to the number of devices. Any thread. */
DFLASH_API dflash_status dflash_device_list(dflash_device_info * infos, int64_t capacity, int64_t * n,
                                            dflash_error * err);

/* What this process has done since it started. Any thread. */
typedef struct dflash_work_counters {
    uint64_t graphs_built;
    uint64_t buffers_allocated; /* working memory of graphs */
    uint64_t graphs_computed;
    uint64_t bytes_to_device; /* inputs of graphs */
    uint64_t bytes_to_host;   /* results of graphs */
} dflash_work_counters;

DFLASH_API void dflash_work_counters_get(dflash_work_counters * out);

/* A build for CUDA carries own kernels for forwards of few rows, whose results do not depend on the number of rows.
 * They take forwards of at most so many rows: 32 at first, up to 512, 0 for none. With 512 prompts too have the same
 * bits however they are cut, but are read slower than by ggml's kernels. What CUDA has captured before keeps its
 * kernels, so set this before models are opened. Both return what holds then, 0 in a build without own kernels. Any
 * thread. */
DFLASH_API int32_t dflash_own_kernels_set(int32_t most_rows);
DFLASH_API int32_t dflash_own_kernels_get(void);

/* Nodes of graphs that own kernels have taken since the process started; a graph that CUDA has captured counts once. */
typedef struct dflash_kernel_count {
    char name[32];
    int64_t nodes;
} dflash_kernel_count;

/* Fills up to capacity entries and sets *n to the number of kinds, 0 in a build without own kernels. Any thread. */
DFLASH_API dflash_status dflash_own_kernels_counts(dflash_kernel_count * counts, int64_t capacity, int64_t * n,
                                                   dflash_error * err);

/* ---- Metadata of model files --------------------------------------------------------------------------- since: 1 */

/* Opens a GGUF file, or all parts of a split one. Only the metadata and the tensor table are read. Immutable: all
 * functions below are for any thread. NOT_FOUND, FORMAT or UNSUPPORTED with file, key and what was found. */
DFLASH_API dflash_status dflash_gguf_open(dflash_gguf ** out, const char * path, dflash_error * err);
DFLASH_API void dflash_gguf_free(dflash_gguf * gguf);

typedef struct dflash_gguf_value {
    int32_t type;         /* GGUF type number: 0 u8 .. 12 f64, 8 string, 9 array */
    int32_t element_type; /* of an array; else equal to type */
    uint64_t count;       /* elements; 1 for scalars */
    uint64_t n_bytes;     /* of the payload */
} dflash_gguf_value;

DFLASH_API dflash_status dflash_gguf_value_count(const dflash_gguf * gguf, int64_t * n, dflash_error * err);
/* Key i, in file order. The key is copied to the buffer with a terminating NUL; *needed is its size with NUL. */
DFLASH_API dflash_status dflash_gguf_value_at(const dflash_gguf * gguf, int64_t i, dflash_gguf_value * value,
                                              char * key, uint64_t size, uint64_t * needed, dflash_error * err);
/* Copies the payload as it lies in the file (little-endian; strings with their 8-byte length in front). */
DFLASH_API dflash_status dflash_gguf_value_read(const dflash_gguf * gguf, int64_t i, void * buffer, uint64_t size,
                                                dflash_error * err);

typedef struct dflash_gguf_tensor {
    char name[64];
    char type[16]; /* "f32", "q8_0", "q4_K", ... */
    int32_t n_dims;
    int32_t split_index; /* part that holds it */
    int64_t ne[4];       /* elements per axis, fastest first */
    uint64_t n_bytes;
} dflash_gguf_tensor;

DFLASH_API dflash_status dflash_gguf_tensor_count(const dflash_gguf * gguf, int64_t * n, dflash_error * err);
DFLASH_API dflash_status dflash_gguf_tensor_at(const dflash_gguf * gguf, int64_t i, dflash_gguf_tensor * out,
                                               dflash_error * err);
/* Copies a tensor's bytes as they lie in the file; size must be its n_bytes. */
DFLASH_API dflash_status dflash_gguf_tensor_read(const dflash_gguf * gguf, int64_t i, void * buffer, uint64_t size,
                                                 dflash_error * err);

/* ---- Target model -------------------------------------------------------------------------------------- since: 1 */

typedef struct dflash_target_options {
    uint32_t struct_size;
    int32_t n_threads;           /* CPU threads; 0: one per hardware thread, up to 16 */
    const char * device;         /* "cpu", "auto", "cuda", "cuda:1", ...; NULL: "cpu" */
    int32_t layer_begin;         /* layers to load: [layer_begin, layer_end) */
    int32_t layer_end;           /* negative: all */
    int32_t load_output;         /* 0: without output norm and head */
    int32_t embedding_on_device; /* 0: embeddings are looked up on the host */
    dflash_progress_fn progress; /* may be NULL; done and total in thousandths */
    void * user;
    int32_t pack_weights; /* on a CPU, of the drafter too: 1 copies quantised matrices into the layout that it
                             multiplies by fastest, where it has one; 0 computes from the mapped file */
} dflash_target_options;

DFLASH_API void dflash_target_options_init(dflash_target_options * options);

typedef struct dflash_target_info {
    char architecture[32];
    char name[128];
    char digest[40]; /* identifies the content of the file */
    char device[64];
    int32_t n_layer; /* without multi-token-prediction blocks */
    int32_t n_layer_nextn;
    int32_t layer_begin; /* loaded range */
    int32_t layer_end;
    int32_t n_embd;
    int32_t n_vocab;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t head_dim;
    int32_t n_ff;
    int32_t n_ctx_train; /* 0: the file does not say */
    int32_t ssm_d_conv;
    int32_t ssm_d_state;
    int32_t ssm_n_group;
    int32_t ssm_dt_rank;
    int32_t is_moe;
    int32_t n_expert;
    int32_t n_expert_used;
    int32_t has_output;
    int32_t mask_token_id; /* -1: none */
    uint64_t weight_bytes;
} dflash_target_info;

/* Read-only after opening: all functions on a target model are for any thread. */
DFLASH_API dflash_status dflash_target_model_open(dflash_target_model ** out, const char * path,
                                                  const dflash_target_options * options, dflash_error * err);
DFLASH_API void dflash_target_model_free(dflash_target_model * model);
DFLASH_API dflash_status dflash_target_model_info(const dflash_target_model * model, dflash_target_info * info,
                                                  dflash_error * err);
/* *recurrent is 1 for a gated DeltaNet layer, 0 for full attention. */
DFLASH_API dflash_status dflash_target_model_layer_kind(const dflash_target_model * model, int32_t layer,
                                                        int32_t * recurrent, dflash_error * err);
/* Ids that end a turn, sorted. Fills up to capacity and sets *n to their number. */
DFLASH_API dflash_status dflash_target_model_stop_ids(const dflash_target_model * model, int32_t * ids,
                                                      int64_t capacity, int64_t * n, dflash_error * err);
/* Embedding rows, looked up on the host: out float32 [n, n_embd]. */
DFLASH_API dflash_status dflash_target_model_embed(const dflash_target_model * model, const int32_t * ids, int64_t n,
                                                   float * out, dflash_error * err);
/* Feature layers when no drafter names them. Fills up to capacity and sets *n. */
DFLASH_API dflash_status dflash_target_model_default_capture(const dflash_target_model * model, int32_t n_taps,
                                                             int32_t * ids, int64_t capacity, int64_t * n,
                                                             dflash_error * err);

/* ---- Target cache -------------------------------------------------------------------------------------- since: 1 */

typedef struct dflash_target_cache_options {
    uint32_t struct_size;
    int32_t max_verify;  /* most rows of one verify forward */
    int64_t capacity;    /* most tokens */
    const char * k_type; /* f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0; NULL: f16 */
    const char * v_type;
    const int32_t * capture_layers; /* layer outputs kept as features; copied */
    int64_t n_capture_layers;
    int64_t feature_capacity;  /* rows of the feature ring; 0: capacity up to the next 256, at most 4096 */
    const char * feature_type; /* f32 f16 bf16; NULL: f32 */
    int32_t layer_begin;
    int32_t layer_end; /* negative: last loaded layer */
    int32_t prefill_only;
    int32_t keep_states; /* verify keeps the recurrent state after every row */
    int64_t fa_window;   /* full-attention layers see the last fa_window keys; 0: all */
} dflash_target_cache_options;

DFLASH_API void dflash_target_cache_options_init(dflash_target_cache_options * options);

typedef struct dflash_target_cache_plan {
    uint64_t k_bytes;
    uint64_t v_bytes;
    uint64_t recurrent_bytes;
    uint64_t conv_bytes;
    uint64_t feature_bytes;
    uint64_t rotation_bytes;
    uint64_t rollback_bytes; /* allocated by the first state snapshot */
    uint64_t total_bytes;
    int64_t physical_capacity; /* rows of K and V, a multiple of 256 */
} dflash_target_cache_plan;

/* Exact bytes of a cache with these options, without making it. Any thread. */
DFLASH_API dflash_status dflash_target_cache_plan_bytes(const dflash_target_model * model,
                                                        const dflash_target_cache_options * options,
                                                        dflash_target_cache_plan * plan, dflash_error * err);
/* One thread at a time per handle for all functions on a cache except cancel. */
DFLASH_API dflash_status dflash_target_cache_new(dflash_target_cache ** out, const dflash_target_model * model,
                                                 const dflash_target_cache_options * options, dflash_error * err);
DFLASH_API void dflash_target_cache_free(dflash_target_cache * cache);

typedef struct dflash_target_cache_state {
    int64_t position; /* committed tokens */
    int64_t capacity;
    int64_t feature_begin; /* positions whose features can be read: [feature_begin, feature_end) */
    int64_t feature_end;
    int32_t n_taps;
    int32_t max_verify;
    int32_t can_verify;
    int32_t poisoned; /* 1: a device error left the state unknown; reset it */
    int64_t physical_capacity;
    uint64_t graph_bytes;  /* working memory of its graphs */
    uint64_t memory_bytes; /* of the cache itself */
} dflash_target_cache_state;

DFLASH_API dflash_status dflash_target_cache_state_get(dflash_target_cache * cache, dflash_target_cache_state * out,
                                                       dflash_error * err);
/* Zeroes the chosen parts; position 0. */
DFLASH_API dflash_status dflash_target_cache_reset(dflash_target_cache * cache, int32_t kv, int32_t recurrent,
                                                   int32_t features, dflash_error * err);
/* Lets a prefill-only cache verify up to max_verify rows. */
DFLASH_API dflash_status dflash_target_cache_migrate(dflash_target_cache * cache, int32_t max_verify,
                                                     dflash_error * err);

typedef struct dflash_forward_options {
    uint32_t struct_size;
    int32_t chunk;       /* most rows of one pass; 0: 512 */
    int32_t layer_begin; /* sub-range of layers; negative: all. Below the last layer the position stays. */
    int32_t layer_end;
    const int64_t * logit_rows; /* rows whose logits are wanted, strictly increasing */
    int64_t n_logit_rows;
    float * logits;                /* out: float32 [n_logit_rows, n_vocab] */
    const int32_t * hidden_layers; /* layers whose outputs are wanted, strictly increasing */
    int64_t n_hidden_layers;
    float * hidden;              /* out: float32 [n_hidden_layers, n, n_embd] */
    const float * hidden_in;     /* float32 [n, n_embd]: input of the first layer instead of ids */
    float * hidden_out;          /* out: float32 [n, n_embd] of the last layer run; NULL: not wanted */
    dflash_progress_fn progress; /* may be NULL; tokens */
    void * user;
} dflash_forward_options;

DFLASH_API void dflash_forward_options_init(dflash_forward_options * options);

/* Appends n tokens. CAPACITY when they do not fit. After CANCELLED the cache holds the chunks that were done. */
DFLASH_API dflash_status dflash_target_cache_forward(dflash_target_cache * cache, const int32_t * ids, int64_t n,
                                                     const dflash_forward_options * options, dflash_error * err);
/* Makes a running forward of this cache stop before its next chunk. Any thread. */
DFLASH_API dflash_status dflash_target_cache_cancel(dflash_target_cache * cache, dflash_error * err);
/* Logits of the newest token, float32 [n_vocab]; NOT_FOUND when the last call did not compute them. */
DFLASH_API dflash_status dflash_target_cache_last_logits(dflash_target_cache * cache, float * logits,
                                                         dflash_error * err);
/* Feature rows of positions [begin, end), float32 [end - begin, n_taps * n_embd]. */
DFLASH_API dflash_status dflash_target_cache_features(dflash_target_cache * cache, int64_t begin, int64_t end,
                                                      float * out, dflash_error * err);
/* One tensor of a layer as float32, for inspection: "k" and "v" [n, n_head_kv * head_dim] of positions [begin, end),
 * "recurrent" [Hv, S, S], "conv" [d_conv - 1, channels] (begin and end ignored). n_values must be its exact size. */
DFLASH_API dflash_status dflash_target_cache_read(dflash_target_cache * cache, int32_t layer, const char * what,
                                                  int64_t begin, int64_t end, float * out, int64_t n_values,
                                                  dflash_error * err);
/* Router choice of the last forward, i32 [rows, n_expert_used]; *n is 0 for dense layers. */
DFLASH_API dflash_status dflash_target_cache_moe_selected(dflash_target_cache * cache, int32_t layer, int32_t * out,
                                                          int64_t capacity, int64_t * n, dflash_error * err);

/* Runs n rows behind the position and leaves recurrent state alone. The outcome stays until the next call that moves
 * the cache. logits may be NULL, else float32 [n, n_vocab]; argmax may be NULL, else [n]. */
DFLASH_API dflash_status dflash_target_cache_verify(dflash_target_cache * cache, const int32_t * ids, int32_t n,
                                                    float * logits, int32_t * argmax, dflash_error * err);
/* Accepts the first n rows of the outcome, 0 <= n <= rows. INVALID when there is no current outcome. */
DFLASH_API dflash_status dflash_target_cache_commit(dflash_target_cache * cache, int32_t n, dflash_error * err);
/* The same for the nodes of a tree: row i is ids[i] behind row parents[i], parents[0] = -1, a parent before its
 * children. commit_path accepts path[0] = 0 and then each time a child of the node before; n = 0 accepts nothing. */
DFLASH_API dflash_status dflash_target_cache_verify_tree(dflash_target_cache * cache, const int32_t * ids,
                                                         const int32_t * parents, int32_t n, float * logits,
                                                         int32_t * argmax, dflash_error * err);
DFLASH_API dflash_status dflash_target_cache_commit_path(dflash_target_cache * cache, const int32_t * path, int32_t n,
                                                         dflash_error * err);
/* Of the current outcome: the recurrent state after a row, float32 [Hv, S, S] (keep_states), and the convolution
 * input, float32 [d_conv - 1 + rows, channels]. */
DFLASH_API dflash_status dflash_target_cache_verify_state(dflash_target_cache * cache, int32_t layer, int32_t row,
                                                          float * out, int64_t n_values, dflash_error * err);
DFLASH_API dflash_status dflash_target_cache_verify_conv(dflash_target_cache * cache, int32_t layer, float * out,
                                                         int64_t n_values, dflash_error * err);
/* Copies recurrent and convolution state aside with the position, and puts them back. */
DFLASH_API dflash_status dflash_target_cache_snapshot_state(dflash_target_cache * cache, dflash_error * err);
DFLASH_API dflash_status dflash_target_cache_restore_state(dflash_target_cache * cache, dflash_error * err);

/* ---- Drafter ------------------------------------------------------------------------------------------- since: 1 */

typedef struct dflash_draft_info {
    char form[16]; /* "huggingface", "llama.cpp" or "lucebox" */
    char digest[256];
    char device[64];
    int32_t n_layer;
    int32_t n_embd;
    int32_t n_ff;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t head_dim;
    int32_t block_size; /* anchor and proposals */
    int32_t n_proposals;
    int32_t mask_token_id;
    int32_t n_taps;
    int32_t target_layer_ids[64]; /* outputs of these layers are the features */
    int32_t windows[64];          /* of the first 64 layers; 0: the whole context */
    int32_t causal[64];
    int32_t sample_from_anchor;
    int32_t has_own_head;
    float rope_theta;
    float rope_freq_scale;
    float rope_ext_factor;
    float rope_attn_factor;
    int32_t rope_n_ctx_orig;
    float rms_eps;
    float embedding_scale;
    float logit_scale;
    float final_logit_softcapping;
    uint64_t weight_bytes;
} dflash_draft_info;

/* path: a Hugging Face folder, a dflash GGUF or a Lucebox-dialect GGUF. device NULL: the target's. weight_type: "f32",
 * "f16", "bf16" or "q8_0" stores float matrices as that type; NULL or "file": as in the file. Read-only after opening:
 * any thread. */
DFLASH_API dflash_status dflash_draft_model_open(dflash_draft_model ** out, const char * path, const char * device,
                                                 const char * weight_type, const dflash_target_model * target,
                                                 dflash_error * err);
DFLASH_API void dflash_draft_model_free(dflash_draft_model * model);
DFLASH_API dflash_status dflash_draft_model_info(const dflash_draft_model * model, dflash_draft_info * info,
                                                 dflash_error * err);

/* What a drafter has beyond a plain network; 0: not there. */
typedef struct dflash_draft_heads {
    int32_t n_vocab;        /* tokens that it proposes from; the target's unless it has a smaller vocabulary */
    int32_t conv_kernel;    /* DFlash2: taps of its convolutions along the block */
    int32_t conv_group;     /* channels that share a tap's dynamic part */
    int32_t selector_rank;  /* DFlash2: width of the selector's codebooks */
    int32_t selector_top_k; /* candidates that it chooses from */
    int32_t markov_rank;    /* DSpark: width of the Markov head */
    int32_t has_confidence; /* DSpark: 1 with a confidence head */
} dflash_draft_heads;

DFLASH_API dflash_status dflash_draft_model_heads(const dflash_draft_model * model, dflash_draft_heads * heads,
                                                  dflash_error * err);

typedef struct dflash_draft_context_options {
    uint32_t struct_size;
    int32_t slack;       /* extra rows of sliding layers */
    const char * k_type; /* f32 f16 q8_0 q4_0; NULL: f32 on a CPU, f16 elsewhere */
    const char * v_type;
    int64_t full_rows; /* context rows that full-attention layers keep */
} dflash_draft_context_options;

DFLASH_API void dflash_draft_context_options_init(dflash_draft_context_options * options);
/* One thread at a time per handle for all functions on a draft context. */
DFLASH_API dflash_status dflash_draft_context_new(dflash_draft_context ** out, const dflash_draft_model * model,
                                                  const dflash_draft_context_options * options, dflash_error * err);
DFLASH_API void dflash_draft_context_free(dflash_draft_context * context);

typedef struct dflash_draft_context_state {
    int64_t begin; /* context rows [begin, cursor) are there */
    int64_t cursor;
    uint64_t memory_bytes;
    uint64_t graph_bytes;
} dflash_draft_context_state;

DFLASH_API dflash_status dflash_draft_context_state_get(dflash_draft_context * context,
                                                        dflash_draft_context_state * out, dflash_error * err);
/* Writes context rows [base, base + n) from features: of a cache on the same device, of a mirror on the drafter's
 * device, or of host memory float32 [n, n_taps * n_embd]. INVALID before any write when base leaves a gap behind the
 * cursor or base + n lies before it. */
DFLASH_API dflash_status dflash_draft_context_append(dflash_draft_context * context, dflash_target_cache * cache,
                                                     int64_t base, int64_t n, dflash_error * err);
DFLASH_API dflash_status dflash_draft_context_append_mirror(dflash_draft_context * context,
                                                            dflash_draft_feature_mirror * mirror, int64_t base,
                                                            int64_t n, dflash_error * err);
DFLASH_API dflash_status dflash_draft_context_append_host(dflash_draft_context * context, const float * features,
                                                          int64_t base, int64_t n, dflash_error * err);
/* Drafts the block behind `anchor`, which stands at the cursor. proposals [n_proposals]; logits may be NULL, else
 * float32 [n_proposals, draft vocabulary] of n_logits values. */
DFLASH_API dflash_status dflash_draft_context_propose(dflash_draft_context * context, int32_t anchor,
                                                      int32_t * proposals, float * logits, int64_t n_logits,
                                                      dflash_error * err);
/* Drafts a tree of up to n_nodes proposals behind `anchor`, best first by the drafter's own probabilities: node 0 is
 * the anchor with parent -1. tokens, parents and scores (natural log-probability of the path to a node) have room for
 * n_nodes + 1, *n is how many came out. n_nodes 1 to 64. */
DFLASH_API dflash_status dflash_draft_context_propose_tree(dflash_draft_context * context, int32_t anchor,
                                                           int32_t n_nodes, int32_t * tokens, int32_t * parents,
                                                           float * scores, int32_t * n, dflash_error * err);
/* How likely the drafter itself takes each proposal of the last draft to be right, given those before it: float32
 * [n_values], n_values at most those that were drafted. UNSUPPORTED for a drafter without confidence head, Markov head
 * or selector. */
DFLASH_API dflash_status dflash_draft_context_chances(dflash_draft_context * context, float * chances, int64_t n_values,
                                                      dflash_error * err);
DFLASH_API dflash_status dflash_draft_context_rewind(dflash_draft_context * context, int64_t position,
                                                     dflash_error * err);
DFLASH_API dflash_status dflash_draft_context_reset(dflash_draft_context * context, int64_t position,
                                                    dflash_error * err);
/* One layer's "k" or "v" rows of positions [begin, end), float32 [end - begin, n_head_kv * head_dim]. */
DFLASH_API dflash_status dflash_draft_context_read(dflash_draft_context * context, int32_t layer, const char * what,
                                                   int64_t begin, int64_t end, float * out, dflash_error * err);

/* ---- Feature mirror ------------------------------------------------------------------------------------ since: 1 */

typedef struct dflash_draft_feature_mirror_options {
    uint32_t struct_size;
    int32_t n_target_layers;          /* captured layers */
    int32_t hidden_size;              /* values of one layer's slice */
    int32_t n_threads;                /* CPU threads of its device; 0: one per hardware thread, up to 16 */
    const char * device;              /* NULL: "cpu" */
    const char * type;                /* f32 f16 bf16 q8_0 q4_0; NULL: f32 */
    int64_t capacity;                 /* rows */
    const dflash_draft_model * draft; /* where not NULL: device and geometry are this drafter's, the fields above
                                         but type and capacity are ignored */
} dflash_draft_feature_mirror_options;

DFLASH_API void dflash_draft_feature_mirror_options_init(dflash_draft_feature_mirror_options * options);
/* One thread at a time per handle for all functions on a mirror. Rows are refused before any is written when they are
 * negative, too many, not there (any more) or never were. *rows receives the number of rows copied. */
DFLASH_API dflash_status dflash_draft_feature_mirror_new(dflash_draft_feature_mirror ** out,
                                                         const dflash_draft_feature_mirror_options * options,
                                                         dflash_error * err);
DFLASH_API void dflash_draft_feature_mirror_free(dflash_draft_feature_mirror * mirror);

typedef struct dflash_draft_feature_mirror_state {
    int64_t begin; /* newest unbroken run of positions held: [begin, end) */
    int64_t end;
    int64_t capacity;
    int32_t n_target_layers;
    int32_t hidden_size;
    uint64_t n_bytes; /* of the ring */
    uint64_t staging_bytes;
    char type[16];
    char device[64];
} dflash_draft_feature_mirror_state;

DFLASH_API dflash_status dflash_draft_feature_mirror_state_get(dflash_draft_feature_mirror * mirror,
                                                               dflash_draft_feature_mirror_state * out,
                                                               dflash_error * err);
/* *slot0 is the first row of positions [committed - ctx_len, committed) when they can be used in place, else -1. */
DFLASH_API dflash_status dflash_draft_feature_mirror_can_view(dflash_draft_feature_mirror * mirror, int64_t committed,
                                                              int64_t ctx_len, int64_t * slot0, dflash_error * err);
DFLASH_API dflash_status dflash_draft_feature_mirror_sync_range(dflash_draft_feature_mirror * mirror,
                                                                dflash_target_cache * cache, int64_t start_pos,
                                                                int64_t n_tokens, int64_t * rows, dflash_error * err);
DFLASH_API dflash_status dflash_draft_feature_mirror_sync_tail(dflash_draft_feature_mirror * mirror,
                                                               dflash_target_cache * cache, int64_t * rows,
                                                               dflash_error * err);
/* One captured layer's slice from host floats [n_tokens, hidden_size]. */
DFLASH_API dflash_status dflash_draft_feature_mirror_write_slice(dflash_draft_feature_mirror * mirror,
                                                                 int32_t capture_idx, int64_t start_pos,
                                                                 int64_t n_tokens, const float * host, int64_t n_values,
                                                                 int64_t * rows, dflash_error * err);
/* Whole rows to and from host floats [n_tokens, n_target_layers * hidden_size]. */
DFLASH_API dflash_status dflash_draft_feature_mirror_write_rows(dflash_draft_feature_mirror * mirror, int64_t start_pos,
                                                                int64_t n_tokens, const float * host, int64_t n_values,
                                                                int64_t * rows, dflash_error * err);
DFLASH_API dflash_status dflash_draft_feature_mirror_read_rows(dflash_draft_feature_mirror * mirror, int64_t start_pos,
                                                               int64_t n_tokens, float * out, int64_t n_values,
                                                               int64_t * rows, dflash_error * err);
DFLASH_API dflash_status dflash_draft_feature_mirror_clear(dflash_draft_feature_mirror * mirror, dflash_error * err);

/* ---- Prefix snapshot ----------------------------------------------------------------------------------- since: 1 */

typedef enum dflash_snapshot_kind {
    DFLASH_SNAPSHOT_FULL = 0,  /* all that is needed to go on from its position */
    DFLASH_SNAPSHOT_DELTA = 1, /* the same, but K/V and draft rows only from where its parent ends */
    DFLASH_SNAPSHOT_THIN = 2   /* K/V of a range of positions and nothing else */
} dflash_snapshot_kind;

typedef enum dflash_snapshot_features {
    DFLASH_SNAPSHOT_FEATURES_TAIL = 0, /* with a drafter, rows it has not read yet; without one, all */
    DFLASH_SNAPSHOT_FEATURES_ALL = 1,
    DFLASH_SNAPSHOT_FEATURES_NONE = 2
} dflash_snapshot_features;

typedef struct dflash_prefix_snapshot_options {
    uint32_t struct_size;
    int32_t features;       /* dflash_snapshot_features */
    int32_t on_device;      /* 1: the bytes stay on the target's device; 0: host memory, pinned where there is a GPU */
    int32_t reserved;       /* 0 */
    const int32_t * tokens; /* what the cache holds; copied. NULL: not known, then no delta can be made of it */
    int64_t n_tokens;       /* the position, or 0 */
    const dflash_prefix_snapshot * parent; /* NULL: full; else a delta behind this one, which stays alive */
} dflash_prefix_snapshot_options;

DFLASH_API void dflash_prefix_snapshot_options_init(dflash_prefix_snapshot_options * options);

typedef struct dflash_prefix_snapshot_info {
    int32_t version;
    int32_t kind; /* dflash_snapshot_kind */
    char architecture[32];
    char target_digest[40];
    char draft_digest[40]; /* empty: no drafter state */
    char token_digest[40]; /* empty: tokens are not known */
    char k_type[16];
    char v_type[16];
    char feature_type[16];
    char draft_k_type[16];
    char draft_v_type[16];
    int32_t k_rotation; /* order of the Hadamard matrix that stored K is rotated by; 0: none */
    int32_t v_rotation;
    int32_t draft_k_rotation;
    int32_t draft_v_rotation;
    float rope_theta;
    int32_t rope_dims;
    int32_t layer_begin;
    int32_t layer_end;
    int32_t n_capture_layers;
    int32_t n_draft_layers; /* 0: no drafter state */
    int32_t capture_layers[64];
    int32_t on_device;
    int32_t depth; /* parents above it */
    int64_t fa_window;
    int64_t position; /* tokens */
    int64_t kv_begin; /* K/V rows [kv_begin, position) are in it */
    int64_t feature_begin;
    int64_t feature_end;
    int64_t draft_begin;
    int64_t draft_cursor;
    int64_t draft_high;
    int64_t draft_held[64]; /* by layer of the drafter: first position with its parents */
    int64_t draft_rows[64]; /* by layer of the drafter: first position in it */
    int64_t n_tokens;
    int64_t n_logits;
    int64_t n_parts;
    uint64_t n_bytes;         /* parts, tokens and logits; parents not counted */
    uint64_t allocated_bytes; /* memory held; parents not counted */
} dflash_prefix_snapshot_info;

typedef struct dflash_prefix_snapshot_part {
    char name[64];
    char type[16];
    int64_t width; /* values of a row */
    int64_t rows;
    int64_t begin; /* position of the first row; 0 for states */
    uint64_t n_bytes;
} dflash_prefix_snapshot_part;

/* Copies what the cache holds, and the drafter's state when context is not NULL. Returns when the copies are queued.
 * INVALID: nothing committed, or another number of tokens; MISMATCH: parent is no prefix or of something else. One
 * thread at a time per cache and context. */
DFLASH_API dflash_status dflash_prefix_snapshot_take(dflash_prefix_snapshot ** out, dflash_target_cache * cache,
                                                     dflash_draft_context * context,
                                                     const dflash_prefix_snapshot_options * options,
                                                     dflash_error * err);
/* K/V of positions [begin, end) only. */
DFLASH_API dflash_status dflash_prefix_snapshot_take_thin(dflash_prefix_snapshot ** out, dflash_target_cache * cache,
                                                          int64_t begin, int64_t end, dflash_error * err);
/* From bytes that part_read gave, in order. info says what they are; its sizes and counts are checked against the
 * models, not believed. draft may be NULL when there is no drafter state, parent when it is no delta. MISMATCH: of
 * other models; FORMAT: numbers that do not fit each other. */
DFLASH_API dflash_status dflash_prefix_snapshot_import(dflash_prefix_snapshot ** out, const dflash_target_model * model,
                                                       const dflash_draft_model * draft,
                                                       const dflash_prefix_snapshot * parent,
                                                       const dflash_prefix_snapshot_info * info, const int32_t * tokens,
                                                       int64_t n_tokens, const float * logits, int64_t n_logits,
                                                       const void * const * data, const uint64_t * n_bytes,
                                                       int64_t n_parts, dflash_error * err);
/* Immutable: all functions below but restore are for any thread. */
DFLASH_API void dflash_prefix_snapshot_free(dflash_prefix_snapshot * snapshot);
DFLASH_API dflash_status dflash_prefix_snapshot_info_get(const dflash_prefix_snapshot * snapshot,
                                                         dflash_prefix_snapshot_info * info, dflash_error * err);
/* Waits until the copies that take queued are done. */
DFLASH_API dflash_status dflash_prefix_snapshot_wait(const dflash_prefix_snapshot * snapshot, dflash_error * err);
DFLASH_API dflash_status dflash_prefix_snapshot_tokens(const dflash_prefix_snapshot * snapshot, int32_t * ids,
                                                       int64_t capacity, int64_t * n, dflash_error * err);
DFLASH_API dflash_status dflash_prefix_snapshot_logits(const dflash_prefix_snapshot * snapshot, float * logits,
                                                       int64_t capacity, int64_t * n, dflash_error * err);
DFLASH_API dflash_status dflash_prefix_snapshot_part_at(const dflash_prefix_snapshot * snapshot, int64_t i,
                                                        dflash_prefix_snapshot_part * part, dflash_error * err);
/* Copies a part's bytes; size must be its n_bytes. */
DFLASH_API dflash_status dflash_prefix_snapshot_part_read(const dflash_prefix_snapshot * snapshot, int64_t i,
                                                          void * buffer, uint64_t size, dflash_error * err);
/* Puts a full or delta snapshot into a cache, and into the drafter's context when that is not NULL. All is checked
 * before the first write; on any failure cache and context are as before. MISMATCH: of another model, drafter, type,
 * rotation, rope or layers, or without the drafter's state; CAPACITY: it does not fit; UNSUPPORTED: a thin one. One
 * thread at a time per cache and context. */
DFLASH_API dflash_status dflash_prefix_snapshot_restore(const dflash_prefix_snapshot * snapshot,
                                                        dflash_target_cache * cache, dflash_draft_context * context,
                                                        dflash_error * err);
/* thick (NULL: what the cache holds), then thin ones. UNSUPPORTED when a layer of the cache is recurrent and they reach
 * beyond the base: its state would stay behind. */
DFLASH_API dflash_status dflash_prefix_snapshot_restore_chain(const dflash_prefix_snapshot * thick,
                                                              const dflash_prefix_snapshot * const * thins,
                                                              int64_t n_thins, dflash_target_cache * cache,
                                                              dflash_error * err);

/* ---- Decoder ------------------------------------------------------------------------------------------- since: 1 */

typedef struct dflash_sampling_options {
    uint32_t struct_size;
    float temperature;    /* 0: greedy */
    int32_t top_k;        /* 0: off */
    float top_p;          /* 1: off */
    float min_p;          /* 0: off */
    float typical_p;      /* 1: off */
    float repeat_penalty; /* 1: off */
    float presence_penalty;
    float frequency_penalty;
    int32_t penalty_last_n; /* -1: the whole context */
    uint64_t seed;
    const int32_t * bias_ids; /* added to the logits; -INFINITY forbids */
    const float * bias_values;
    int64_t n_bias;
    int32_t ignore_eos;       /* 1: stop ids are forbidden and end nothing */
    int32_t logprobs;         /* 1: log-probability of each token */
    int32_t n_logprobs;       /* likeliest tokens reported besides, 0 to 20 */
    const int32_t * stop_ids; /* ids that end the request; NULL: the model's */
    int64_t n_stop_ids;
} dflash_sampling_options;

DFLASH_API void dflash_sampling_options_init(dflash_sampling_options * options);

typedef struct dflash_decoder_options {
    uint32_t struct_size;
    int32_t prefill_chunk;                   /* 0: 512 */
    int32_t autoregressive_on_draft_failure; /* 0: a failure of the drafter is an error */
} dflash_decoder_options;

DFLASH_API void dflash_decoder_options_init(dflash_decoder_options * options);

/* Why a step ended early. */
typedef enum dflash_stop_reason {
    DFLASH_STOP_NONE = 0,
    DFLASH_STOP_TOKEN = 1, /* the last token is a stop id */
    DFLASH_STOP_BUDGET = 2 /* as many tokens as were allowed */
} dflash_stop_reason;

typedef struct dflash_step_result {
    int32_t n_tokens; /* emitted by this call */
    int32_t tokens[64];
    float logprobs[64]; /* NaN unless asked for */
    int32_t n_proposed; /* proposals that were verified */
    int32_t n_accepted;
    int32_t width;  /* rows of the target forward */
    int32_t reason; /* dflash_stop_reason */
    double draft_ms;
    double verify_ms;
    double accept_ms;
    double commit_ms; /* of the step before, which this call committed */
    double append_ms;
    int32_t tree;             /* nodes of the tree that was verified; 0: a chain, or nothing */
    int32_t depth;            /* of the deepest proposal */
    int32_t n_chain;          /* the drafter's first choices, one behind the other */
    int32_t n_chain_accepted; /* of these, in a row */
} dflash_step_result;

typedef struct dflash_decoder_state {
    int64_t position;      /* tokens in the cache once the last step is committed */
    int64_t room;          /* tokens that still fit */
    int64_t prompt_tokens; /* counts since begin */
    int64_t emitted;
    int64_t steps;
    int64_t draft_steps;
    int64_t proposed;
    int64_t accepted;
    int64_t proposed_by_slot[64];
    int64_t accepted_by_slot[64];
    double prefill_ms;
    double draft_ms;
    double verify_ms;
    double accept_ms;
    double commit_ms;
    double append_ms;
    int32_t has_drafter; /* 0 also after the drafter failed */
    int32_t max_width;
    char draft_disabled[256]; /* why it is off; empty while it works */
    int32_t max_tree;         /* most nodes of a tree; 0 without a drafter */
    int32_t reserved_;
} dflash_decoder_state;

/* The token loop over one cache. context may be NULL; with the drafter on another device than the cache, mirror carries
 * the features. While the decoder lives, use cache, context and mirror through it or between its calls only.
 * One thread at a time per handle for all functions on a decoder except cancel. */
DFLASH_API dflash_status dflash_decoder_new(dflash_decoder ** out, dflash_target_cache * cache,
                                            dflash_draft_context * context, dflash_draft_feature_mirror * mirror,
                                            const dflash_decoder_options * options, dflash_error * err);
DFLASH_API void dflash_decoder_free(dflash_decoder * decoder);
/* Starts a request. The cache keeps what it holds. */
DFLASH_API dflash_status dflash_decoder_begin(dflash_decoder * decoder, const dflash_sampling_options * sampling,
                                              dflash_error * err);
/* Appends part of a prompt whose rest follows; draws nothing. */
DFLASH_API dflash_status dflash_decoder_feed(dflash_decoder * decoder, const int32_t * ids, int64_t n,
                                             dflash_progress_fn progress, void * user, dflash_error * err);
/* Forgets the token that is still to be consumed; what is pending is committed first. */
DFLASH_API dflash_status dflash_decoder_drop_anchor(dflash_decoder * decoder, dflash_error * err);
/* Lets the drafter read features that wait for it, so that a snapshot needs none of them. */
DFLASH_API dflash_status dflash_decoder_catch_up(dflash_decoder * decoder, dflash_error * err);
/* Puts a snapshot that knows its tokens into cache and context, and goes on from there; errors as
 * dflash_prefix_snapshot_restore. */
DFLASH_API dflash_status dflash_decoder_restore(dflash_decoder * decoder, const dflash_prefix_snapshot * snapshot,
                                                dflash_error * err);
/* Appends the prompt and draws the first token. n = 0 is legal when a token of an earlier call is still to be consumed,
 * and when the cache has the logits of its newest token.
 * budget: most tokens to emit in this request from here on. */
DFLASH_API dflash_status dflash_decoder_prefill(dflash_decoder * decoder, const int32_t * ids, int64_t n,
                                                int64_t budget, dflash_progress_fn progress, void * user,
                                                dflash_step_result * result, dflash_error * err);
/* Commits the step before, then emits at least one token: with width > 1 by verifying width - 1 proposals. */
DFLASH_API dflash_status dflash_decoder_step(dflash_decoder * decoder, int32_t width, int64_t budget,
                                             dflash_step_result * result, dflash_error * err);
/* The same with a tree of n_nodes proposals, 1 to 64: one target forward of n_nodes + 1 rows. INVALID when the cache
 * verifies fewer rows. */
DFLASH_API dflash_status dflash_decoder_step_tree(dflash_decoder * decoder, int32_t n_nodes, int64_t budget,
                                                  dflash_step_result * result, dflash_error * err);
/* Commits the step before, its first n_keep tokens only (negative: all), and waits for the device. */
DFLASH_API dflash_status dflash_decoder_settle(dflash_decoder * decoder, int64_t n_keep, dflash_error * err);
/* Log-probabilities of token i of the last call: up to capacity likeliest, *n of them. */
DFLASH_API dflash_status dflash_decoder_top_logprobs(dflash_decoder * decoder, int32_t i, int32_t * ids,
                                                     float * logprobs, int64_t capacity, int64_t * n,
                                                     dflash_error * err);
DFLASH_API dflash_status dflash_decoder_state_get(dflash_decoder * decoder, dflash_decoder_state * out,
                                                  dflash_error * err);
/* All tokens so far, the one that is still to be consumed last. Fills up to capacity, sets *n. */
DFLASH_API dflash_status dflash_decoder_tokens(dflash_decoder * decoder, int32_t * ids, int64_t capacity, int64_t * n,
                                               dflash_error * err);
/* Forgets the sequence. */
DFLASH_API dflash_status dflash_decoder_reset(dflash_decoder * decoder, dflash_error * err);
/* Makes the running prefill stop before its next chunk, and the next step fail with CANCELLED; begin clears it.
 * Any thread. */
DFLASH_API dflash_status dflash_decoder_cancel(dflash_decoder * decoder, dflash_error * err);
/* Says which tokens the next draw may give: sets bit id % 32 of allowed[id / 32], all clear before, n_words words.
 * Called in order for each row that is drawn from, on the thread of the call; emitted are the n tokens drawn in this
 * call so far, accepted proposals included. A return value other than 0 cancels the call; the tokens it drew are
 * dropped. */
typedef int32_t (*dflash_mask_fn)(const int32_t * emitted, int64_t n, uint32_t * allowed, int64_t n_words, void * user);
/* prefill and step with a mask on every draw. A proposal stands only while it is a draw that the mask allows, so the
 * tokens are those of masked decoding without a drafter. Log-probabilities stay those of the whole vocabulary. INVALID:
 * a row without an allowed token. */
DFLASH_API dflash_status dflash_decoder_prefill_masked(dflash_decoder * decoder, const int32_t * ids, int64_t n,
                                                       int64_t budget, dflash_mask_fn mask, void * user,
                                                       dflash_step_result * result, dflash_error * err);
DFLASH_API dflash_status dflash_decoder_step_masked(dflash_decoder * decoder, int32_t width, int64_t budget,
                                                    dflash_mask_fn mask, void * user, dflash_step_result * result,
                                                    dflash_error * err);
/* From the next step on a chain ends in front of the first proposal whose chance to be reached and right, by the
 * drafter's own word, is below min_chance, then rounded up to 2, 4, 8, ... rows. 0, as at first: it never does. Without
 * effect on drafters that do not say what their proposals are worth, and on the tokens that come out. INVALID unless
 * 0 <= min_chance < 1. */
DFLASH_API dflash_status dflash_decoder_min_chance_set(dflash_decoder * decoder, float min_chance, dflash_error * err);

/* cdef: end. */

#ifdef __cplusplus
}
#endif

#endif /* DFLASH_H */
