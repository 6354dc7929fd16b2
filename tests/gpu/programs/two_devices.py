"""Greedy decoding with the drafter on a second device, once for each storage type of the mirror.

    GGML_CUDA_DEVICES=2 python two_devices.py TARGET_DEVICE DRAFT_DEVICE

The last line of the output is a JSON object: how -> ids of each prompt, proposals verified and accepted. "one device"
is the same with both models on the first one.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pydflash
from pydflash.options import MirrorType

N_PROMPTS, N_NEW, WIDTH = 8, 64, 16
PROMPTS = Path(__file__).resolve().parents[3] / "scripts" / "prompts.json"


def decode(
    target: pydflash.TargetModel, draft: pydflash.DraftModel, mirror_type: MirrorType | None, prompts: list[list[int]]
) -> dict[str, object]:
    ids_of_all: list[list[int]] = []
    proposed = accepted = 0
    with ExitStack() as stack:
        layers = draft.config.target_layer_ids
        cache = stack.enter_context(pydflash.TargetCache(target, 512, capture_layers=layers))
        context = stack.enter_context(pydflash.DraftContext(draft))
        mirror = None
        if mirror_type is not None:
            mirror = stack.enter_context(pydflash.DraftFeatureMirror(draft, capacity=512, dtype=mirror_type))
        decoder = stack.enter_context(pydflash.Decoder(cache, context, mirror))
        for prompt in prompts:
            decoder.reset()
            decoder.begin(pydflash.SamplingOptions())
            result = decoder.prefill(prompt, N_NEW)
            ids = list(result.tokens)
            while len(ids) < N_NEW and result.reason == "none":
                result = decoder.step(WIDTH, N_NEW - len(ids))
                ids += result.tokens
            ids_of_all.append(ids)
            stats = decoder.stats
            proposed, accepted = proposed + stats.proposed, accepted + stats.accepted
    return {"ids": ids_of_all, "proposed": proposed, "accepted": accepted}


def main() -> None:
    first, second = sys.argv[1:]
    entries = json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]
    with pydflash.TargetModel.open(None, first) as target:
        with pydflash.Engine.open(target, None) as engine:
            prompts = [list(engine.encode(entry["text"])) for entry in entries[:N_PROMPTS]]
        found = {}
        with pydflash.DraftModel.open(None, target) as draft:
            found["one device"] = decode(target, draft, None, prompts)
        with pydflash.DraftModel.open(None, target, second) as draft:
            found["devices"] = {"target": target.device, "draft": draft.device}
            for mirror_type in get_args(MirrorType):
                found[mirror_type] = decode(target, draft, mirror_type, prompts)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
