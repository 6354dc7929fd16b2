"""llama.cpp's own server, in this process, from the prebuilt wheel `xllamacpp`."""

import json
import urllib.request
from typing import Any

import gguf
import xllamacpp


class LlamaServer:
    """One server with one slot; `draft` turns on llama.cpp's DFlash speculation with up to `n_max` drafts a step,
    ended in front of the first one whose probability, or confidence with a DSpark drafter, is below `p_min`.

    exact=True keeps K/V in f32 and flash attention off, since llama.cpp's CPU flash attention rounds to half precision.
    """

    def __init__(
        self,
        target: str,
        draft: str | None = None,
        *,
        n_max: int = 15,
        p_min: float = 0.0,
        threads: int = 1,
        context: int = 1024,
        exact: bool = True,
    ) -> None:
        options = xllamacpp.CommonParams()
        options.model.path = target
        options.n_ctx, options.n_parallel = context, 1
        options.n_batch = options.n_ubatch = 512
        options.n_gpu_layers = 0
        options.warmup, options.verbosity = False, 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        speculation = options.speculative
        if exact:
            options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if draft is not None:
            kinds = xllamacpp.common_speculative_type
            dspark = any(tensor.name == "markov_w1.weight" for tensor in gguf.GGUFReader(draft).tensors)
            speculation.types = [
                kinds.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK if dspark else kinds.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH
            ]
            speculation.draft.mparams.path = draft
            speculation.draft.n_max, speculation.draft.n_min, speculation.draft.p_min = n_max, 0, p_min
            speculation.draft.cpuparams.n_threads = speculation.draft.cpuparams_batch.n_threads = threads
            if exact:
                speculation.draft.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
                speculation.draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self._server = xllamacpp.Server(options)
        self.n_vocab = len(gguf.GGUFReader(target).fields["tokenizer.ggml.tokens"].data)

    def complete(self, prompt: list[int] | str, n_predict: int, **fields: Any) -> dict[str, Any]:
        """Greedy /completion; returns the server's answer with `tokens` and `timings`."""
        body = {
            "prompt": prompt,
            "n_predict": n_predict,
            "temperature": 0.0,
            "return_tokens": True,
            "cache_prompt": False,
            **fields,
        }
        request = urllib.request.Request(
            self._server.listening_address + "/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            result: dict[str, Any] = json.loads(answer.read())
        return result

    def next_logprobs(self, ids: list[int], n_probs: int) -> dict[int, float]:
        """Natural-log probabilities of the `n_probs` likeliest tokens after `ids`, before any sampler.

        The server leaves them out while a UTF-8 character is incomplete, so it is made to emit token 0, a plain "!".
        """
        answer = self.complete(ids, 1, n_probs=n_probs, logit_bias=[[0, 1e4]])
        rows = answer["completion_probabilities"][0]["top_logprobs"]
        return {int(row["id"]): float(row["logprob"]) for row in rows}
