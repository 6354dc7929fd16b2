#!/bin/bash
# Make the committed tiny models and their golden numbers again: about ten minutes on one core.
#
#   make_goldens.sh LLAMA_CPP OUT
#
# LLAMA_CPP is a llama.cpp source tree with its converter; OUT gets models/, drafters/ and goldens/ as under tests/data.
# PYTHON names an interpreter with the packages that README.md lists.
set -euo pipefail
llama_cpp=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONHASHSEED=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"/{models,drafters,goldens}

# A progress bar on stderr is noise until the command fails.
py() { "${PYTHON:-python}" -W ignore "$@" 2>"$work/stderr" || { cat "$work/stderr" >&2; exit 1; }; }

for preset in nano micro dense hd256 equalkv moe wide; do
    py make_tiny_target.py "$work/$preset" --preset $preset
    py hf_to_gguf.py "$llama_cpp" "$work/$preset" "$work/$preset-bf16.gguf"
done
py make_tiny_target.py "$work/micro-mtp" --preset micro --mtp
py hf_to_gguf.py "$llama_cpp" "$work/micro-mtp" "$work/micro-mtp-bf16.gguf"

for preset in nano micro dense hd256 equalkv moe; do
    cp "$work/$preset-bf16.gguf" "$out/models"
    py reference_target.py "$work/$preset" "$out/goldens/target-$preset.npz"
done
cp "$work/micro-mtp-bf16.gguf" "$out/models"
py reference_target.py "$work/nano" "$out/goldens/nano-logits-f16.npz" --all-f16
py requantize.py "$work/wide-bf16.gguf" "$out/models/wide-q4_k.gguf" --type q4_k
py reference_target.py "$work/wide" "$out/goldens/target-wide.npz" --weights "$out/models/wide-q4_k.gguf"

# Drafters with golden steps, for the nano target.
stepped() {
    py make_tiny_draft.py "$work/nano" "$work/$1" --size large "${@:2}"
    py hf_to_gguf.py "$llama_cpp" "$work/$1" "$out/models/$1-bf16.gguf" --target "$work/nano"
    py reference_draft.py steps "$work/nano" "$work/$1" "$out/goldens/$1.json"
}
stepped d-rand
stepped d-part --teach 120
stepped d-swa --layers 3 --window 24 --teach 90
stepped d2-part --kind dflash2 --teach 130
stepped ds-part --kind dspark --teach 120

# A drafter for long contexts, of nano with a short memory.
py shorten_memory.py "$work/nano" "$work/forgetful"
py make_tiny_draft.py "$work/forgetful" "$work/d-long" --size large --window 24 --all-sliding --teach 45
py hf_to_gguf.py "$llama_cpp" "$work/d-long" "$out/models/d-long-bf16.gguf" --target "$work/forgetful"
py reference_draft.py steps "$work/forgetful" "$work/d-long" "$out/goldens/d-long.json"

# Drafters with golden block logits, for the nano target; all hold the same weights under different configs.
block() {
    py make_tiny_draft.py "$work/nano" "$out/drafters/$1" "${@:3}"
    py hf_to_gguf.py "$llama_cpp" "$out/drafters/$1" "$out/drafters/$1-bf16.gguf" --target "$work/nano"
    # shellcheck disable=SC2086
    py reference_draft.py block "$work/nano" "$out/drafters/$1" "$out/goldens/block-$1.npz" $2
}
block full "--contexts 12,40,96 --features"
block full-causal "--contexts 12,40,96" --causal yes
block swa "--contexts 12,24,40,96" --window 24
block swa-causal "--contexts 12,24,40,96" --window 24 --causal yes
block swa-bidirectional "--contexts 12,24,40,96" --window 24 --causal no
block yarn "--contexts 12,40,96,200" --yarn 64
variant() {
    py make_tiny_draft.py "$work/nano" "$out/drafters/$1" "${@:3}"
    # shellcheck disable=SC2086
    py reference_draft.py block "$work/nano" "$out/drafters/$1" "$out/goldens/block-$1.npz" $2 --proposals
    # llama.cpp's converter knows no reduced vocabulary without a Markov head.
    [ "$1" = reduced ] || py hf_to_gguf.py "$llama_cpp" "$out/drafters/$1" "$out/drafters/$1-bf16.gguf" --target "$work/nano"
}
variant reduced "--contexts 12,40" --draft-vocab 96 --speculators
variant dflash2 "--contexts 12,24,40,96" --kind dflash2 --window 24
variant dspark "--contexts 12,40,96" --kind dspark
variant dspark-speculators "--contexts 12,24,40,96" --kind dspark --speculators --draft-vocab 96 --window 24
py write_lucebox_draft.py "$out/drafters/full" "$out/drafters/full-lucebox-f16.gguf"
py write_lucebox_draft.py "$out/drafters/swa" "$out/drafters/swa-lucebox-f16.gguf" --arch dflash-draft --old-names

# What llama.cpp computes from quantised bytes.
peer() {
    py requantize.py "$out/models/nano-bf16.gguf" "$work/nano-$1.gguf" --type "$1"
    py compare_with_llama_cpp.py record "$work/nano-$1.gguf" "$out/goldens/target-nano.npz" "$out/goldens/peer-nano-$1.npz"
}
peer q8_0
peer q4_0
py compare_with_llama_cpp.py record "$out/models/wide-q4_k.gguf" "$out/goldens/target-wide.npz" "$out/goldens/peer-wide-q4_k.npz"
