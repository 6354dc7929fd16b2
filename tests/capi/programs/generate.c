/*
 * Speculative decoding through dflash.h on one page: what a C or C++ server that embeds the engine does for a request.
 *
 *     generate TARGET.gguf DRAFTER|- N_TOKENS ID...
 *
 * Reads the prompt as token ids, writes the ids of the answer to standard output as they come, and figures to standard
 * error. DRAFTER is a GGUF file or a Hugging Face folder; - decodes without one.
 */
#include "dflash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Everything one sequence needs. Zero-initialised: each ..._free takes NULL. */
typedef struct session {
    dflash_target_model * target;
    dflash_draft_model * drafter;
    dflash_target_cache * cache;
    dflash_draft_context * context;
    dflash_decoder * decoder;
} session;

static dflash_status open_session(session * s, const char * target, const char * drafter, dflash_error * err) {
    dflash_target_options model_options;
    dflash_target_cache_options cache_options;
    dflash_draft_info info;
    dflash_status status;

    dflash_target_options_init(&model_options);
    model_options.n_threads = 1; /* enough for a small model; 0: one per hardware thread */
    dflash_target_cache_options_init(&cache_options);
    status = dflash_target_model_open(&s->target, target, &model_options, err);
    if (status == DFLASH_STATUS_OK && drafter != NULL) {
        status = dflash_draft_model_open(&s->drafter, drafter, NULL, NULL, s->target, err);
        if (status == DFLASH_STATUS_OK) {
            status = dflash_draft_model_info(s->drafter, &info, err);
        }
        if (status == DFLASH_STATUS_OK) {
            status = dflash_draft_context_new(&s->context, s->drafter, NULL, err);
        }
        if (status == DFLASH_STATUS_OK) { /* the cache keeps the layer outputs that the drafter reads */
            cache_options.capture_layers = info.target_layer_ids;
            cache_options.n_capture_layers = info.n_taps;
        }
    }
    if (status == DFLASH_STATUS_OK) {
        status = dflash_target_cache_new(&s->cache, s->target, &cache_options, err);
    }
    if (status == DFLASH_STATUS_OK) {
        status = dflash_decoder_new(&s->decoder, s->cache, s->context, NULL, NULL, err);
    }
    return status;
}

static void close_session(session * s) {
    dflash_decoder_free(s->decoder);
    dflash_draft_context_free(s->context);
    dflash_target_cache_free(s->cache);
    dflash_draft_model_free(s->drafter);
    dflash_target_model_free(s->target);
}

/* One request: the prompt, then steps until a stop token or n_tokens. Call it again to continue the conversation. */
static dflash_status answer(dflash_decoder * decoder, const int32_t * ids, int64_t n, int64_t n_tokens,
                            dflash_error * err) {
    dflash_sampling_options sampling;
    dflash_decoder_state state;
    dflash_step_result step;
    dflash_status status;

    dflash_sampling_options_init(&sampling);
    sampling.temperature = 0.0f; /* or any other: with a seed the text is the same with and without a drafter */
    status = dflash_decoder_begin(decoder, &sampling, err);
    if (status == DFLASH_STATUS_OK) {
        status = dflash_decoder_prefill(decoder, ids, n, n_tokens, NULL, NULL, &step, err);
    }
    if (status == DFLASH_STATUS_OK) {
        status = dflash_decoder_state_get(decoder, &state, err);
    }
    while (status == DFLASH_STATUS_OK) {
        for (int32_t i = 0; i < step.n_tokens; ++i) {
            printf("%d ", (int)step.tokens[i]);
        }
        fflush(stdout);
        n_tokens -= step.n_tokens;
        if (n_tokens == 0 || step.reason != DFLASH_STOP_NONE) {
            break;
        }
        /* max_width: the whole block that the drafter proposes; 1 without a drafter */
        status = dflash_decoder_step(decoder, state.max_width, n_tokens, &step, err);
    }
    printf("\n");
    if (status == DFLASH_STATUS_OK) {
        status = dflash_decoder_settle(decoder, -1, err);
    }
    if (status == DFLASH_STATUS_OK) {
        status = dflash_decoder_state_get(decoder, &state, err);
    }
    if (status == DFLASH_STATUS_OK) {
        fprintf(stderr, "%lld tokens in %lld steps, %lld of %lld proposals accepted\n", (long long)state.emitted,
                (long long)state.steps, (long long)state.accepted, (long long)state.proposed);
    }
    return status;
}

int main(int argc, char ** argv) {
    session s = {NULL, NULL, NULL, NULL, NULL};
    dflash_error err = DFLASH_ERROR_INIT;
    dflash_status status;
    int32_t * ids;

    if (argc < 5) {
        fprintf(stderr, "usage: %s TARGET.gguf DRAFTER|- N_TOKENS ID...\n", argv[0]);
        return 2;
    }
    if (dflash_abi_version() != DFLASH_ABI_VERSION) {
        fprintf(stderr, "libdflash has ABI version %d, not %d\n", (int)dflash_abi_version(), DFLASH_ABI_VERSION);
        return 1;
    }
    ids = (int32_t *)malloc((size_t)(argc - 4) * sizeof(*ids));
    if (ids == NULL) {
        return 1;
    }
    for (int i = 4; i < argc; ++i) {
        ids[i - 4] = (int32_t)strtol(argv[i], NULL, 10);
    }
    status = open_session(&s, argv[1], strcmp(argv[2], "-") == 0 ? NULL : argv[2], &err);
    if (status == DFLASH_STATUS_OK) {
        status = answer(s.decoder, ids, argc - 4, strtol(argv[3], NULL, 10), &err);
    }
    if (status != DFLASH_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", dflash_status_name(err.status), err.message);
    }
    close_session(&s);
    free(ids);
    return status == DFLASH_STATUS_OK ? 0 : 1;
}
