#!/usr/bin/env bash
# Compile pydflash's own CUDA kernels and link them into a library, without a GPU and without the rest of ggml's CUDA
# backend, and try the insertion of their hook on ggml's source. Needs nvcc; about a minute for each architecture.
#
#     scripts/check_cuda.sh [ARCHITECTURE]...            default: 90
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[[ -x $nvcc ]] || { echo "check_cuda.sh: no nvcc on the path or in /usr/local/cuda/bin" >&2; exit 2; }
ggml=$(python3 third_party/fetch_ggml.py ${DFLASH_CACHE_DIR:+--cache-dir "$DFLASH_CACHE_DIR"})
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 third_party/hook_ggml_cuda.py "$ggml/src/ggml-cuda/ggml-cuda.cu" "$work/hooked.cu"
options=(-std=c++17 -O2 -Inative -I"$ggml/include" -Xcompiler=-fPIC,-fvisibility=hidden --Werror all-warnings)
for architecture in "${@:-90}"; do options+=("-gencode=arch=compute_$architecture,code=sm_$architecture"); done
for source in native/cuda/*.cu; do echo "$source"; done |
    xargs -P "$(nproc)" -I{} sh -c '"$0" "$@" -c "{}" -o "'"$work"'/$(basename "{}").o"' "$nvcc" "${options[@]}"
# The hook is ggml's to define, and ggml's own functions come from its library.
"$nvcc" -shared -o "$work/kernels.so" "$work"/*.o
echo "compiled for ${*:-90} and linked: $(stat -c %s "$work/kernels.so") bytes"
