#!/usr/bin/env bash
# Build pydflash with CUDA on a machine without a network, run the GPU tests, make a model pair and measure it.
#
#     scripts/gpu_run.sh pack SDIST.tar.gz SOURCES.tar.xz            sources, packed where there is a network
#     scripts/gpu_run.sh [OPTION]... PART...             parts: configure build install test pair bench
#
#     --sources PATH   ggml or llama.cpp sources: a folder, or an archive of one (as `pack` writes it)
#     --llama          also build llama.cpp's llama-bench and llama-server with the same ggml, and measure them too
#     --wheels FOLDER  wheels that the machine's Python lacks: cffi gguf pycparser pytest ...
#     --out FOLDER     run.log, bench.json and pictures; default: gpu-results
#     --work FOLDER    everything else; default: /tmp/pydflash-gpu. What is built there is kept and used again
#     --pair FOLDER    the model pair; default: /dev/shm/pydflash-pair if it is large enough, else in the work folder
#     --size SIZE      of the pair; default: 27B
#     --windows "N..." of its drafters; default: "0 2048"
#     --arch ARCH      CMAKE_CUDA_ARCHITECTURES; default: 90
#     --jobs N         default: all processors
#     --seconds N      stop after so many; default: 580
#     --cpu            build without CUDA and measure on the CPU
#     --test "WORDS"   for pytest; default: "-m gpu tests/gpu"
#     --bench "WORDS"  for bench_gpu.py besides --pair, --device and --json
#
# The pair is written while the build runs. A part that fails ends the script, with the end of its log.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() { printf 'gpu_run.sh: %s\n' "$1" >&2; exit 2; }

if [[ ${1:-} == pack ]]; then
    [[ $# -eq 3 ]] || die "usage: gpu_run.sh pack SDIST.tar.gz SOURCES.tar.xz"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # Only what llama-bench and llama-server need; the shaders and kernels of other backends are most of the rest.
    tar -xzf "$2" -C "$folder" --strip-components=2 --wildcards \
        --exclude='*/ggml-vulkan/*' --exclude='*/ggml-opencl/*' --exclude='*/ggml-sycl/*' --exclude='*/ggml-hexagon/*' \
        --exclude='*/ggml-metal/*' --exclude='*/ggml-webgpu/*' --exclude='*/ggml-cann/*' --exclude='*/tools/ui/src/*' \
        '*/vendor/llama.cpp/ggml/*' '*/vendor/llama.cpp/src/*' '*/vendor/llama.cpp/include/*' '*/vendor/llama.cpp/LICENSE' \
        '*/vendor/llama.cpp/common/*' '*/vendor/llama.cpp/vendor/*' '*/vendor/llama.cpp/tools/*' \
        '*/vendor/llama.cpp/cmake/*' '*/vendor/llama.cpp/licenses/*' '*/vendor/llama.cpp/CMakeLists.txt' \
        '*/vendor/llama.cpp/scripts/ui-assets.cmake'
    tar -cJf "$3" -C "$folder" llama.cpp
    ls -l "$3"
    exit
fi

sources="" llama=0 wheels="" out=gpu-results work=/tmp/pydflash-gpu pair="" size=27B windows="0 2048" arch=90
jobs=$(nproc) seconds=580 cuda=1 test_words="-m gpu tests/gpu" bench_words="" parts=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --llama) llama=1 ;;
        --cpu) cuda=0 ;;
        --sources | --wheels | --out | --work | --pair | --size | --windows | --arch | --jobs | --seconds | --test | --bench)
            [[ $# -ge 2 ]] || die "$1 needs a value"
            case $1 in
                --sources) sources=$(realpath "$2") ;;
                --wheels) wheels=$(realpath "$2") ;;
                --out) out=$2 ;;
                --work) work=$2 ;;
                --pair) pair=$2 ;;
                --size) size=$2 ;;
                --windows) windows=$2 ;;
                --arch) arch=$2 ;;
                --jobs) jobs=$2 ;;
                --seconds) seconds=$2 ;;
                --test) test_words=$2 ;;
                --bench) bench_words=$2 ;;
            esac
            shift ;;
        configure | build | install | test | pair | bench) parts+=("$1") ;;
        *) die "unknown word: $1" ;;
    esac
    shift
done
[[ ${#parts[@]} -gt 0 ]] || die "no part given: configure build install test pair bench"
has() { [[ " ${parts[*]} " == *" $1 "* ]]; }

mkdir -p "$out" "$work"
out=$(realpath "$out") work=$(realpath "$work")
build=$work/build site=$work/site log=$out/run.log
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_BUILD_PARALLEL_LEVEL=$jobs

started=$SECONDS
note() { printf '== %s (%d s)\n' "$1" "$((SECONDS - started))"; }

# part NAME COMMAND...: within what is left of the time; all output goes into the log and onto the terminal.
# quiet_part: the terminal sees one line in forty, and the end when it fails.
part() { run_part cat "$@"; }
quiet_part() { run_part "awk 'NR % 40 == 0 { print substr(\$0, 1, 120); fflush() }'" "$@"; }
run_part() {
    local show=$1 name=$2 left=$((seconds - (SECONDS - started))) code
    shift 2
    ((left > 5)) || die "no time is left for $name"
    note "$name" | tee -a "$log"
    set +e
    timeout --kill-after=10 "$left" "$@" 2>&1 | tee -a "$log" | bash -c "$show"
    code=${PIPESTATUS[0]}
    set -e
    if ((code != 0)); then
        [[ $show == cat ]] || tail -n 40 "$log"
        note "$name ended with $code" | tee -a "$log"
        exit "$code"
    fi
}

# Before the machine's own packages on the path.
if [[ -n $wheels && ! -e $work/wheels-installed ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/packages" "$wheels"/*.whl
    touch "$work/wheels-installed"
fi
export PYTHONPATH=$site:$work/packages${PYTHONPATH:+:$PYTHONPATH}

unpack() {
    [[ -n $sources ]] || die "build needs --sources"
    if [[ -f $sources ]]; then
        [[ -e $work/sources/unpacked ]] || { mkdir -p "$work/sources" && tar -xf "$sources" -C "$work/sources" && touch "$work/sources/unpacked"; }
        tree=$(find "$work/sources" -mindepth 1 -maxdepth 1 -type d | head -n 1)
    else
        tree=$sources
    fi
    ggml=$tree
    [[ -d $tree/ggml/include ]] && ggml=$tree/ggml
    [[ -f $ggml/include/ggml.h ]] || die "$sources holds no ggml"
    if ((llama)) && [[ ! -d $tree/tools/server ]]; then die "--llama needs the sources of llama.cpp, $sources has only ggml"; fi
}

# nvcc may come without cuBLAS, which PyTorch brings as a Python package without the links that a linker looks for.
cublas_options() {
    local nvcc root packages
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    [[ -x $nvcc ]] || die "no nvcc on the path or in /usr/local/cuda/bin"
    cmake_options+=("-DCMAKE_CUDA_COMPILER=$nvcc" "-DCMAKE_CUDA_ARCHITECTURES=$arch")
    root=$(dirname "$(dirname "$(realpath "$nvcc")")")
    compgen -G "$root/lib64/libcublas.so*" > /dev/null && return
    packages=$("$python" -c 'import nvidia, pathlib; print(*(p for b in nvidia.__path__ for p in pathlib.Path(b).glob("*/lib/libcublas.so.*")), sep="\n")' | head -n 1)
    [[ -n $packages ]] || die "no cuBLAS in $root nor among Python's packages (nvidia-cublas)"
    packages=$(dirname "$packages")
    mkdir -p "$work/cublas"
    for name in cublas cublasLt; do
        ln -sf "$(ls "$packages/lib$name.so."* | head -n 1)" "$work/cublas/lib$name.so"
        cmake_options+=("-DCUDA_${name}_LIBRARY=$work/cublas/lib$name.so")
    done
    local include
    include=$(realpath "$packages/../include")
    # Only the files of cuBLAS: the package may hold other headers, of another version than nvcc's.
    mkdir -p "$work/cublas/include"
    ln -sf "$include"/cublas*.h "$work/cublas/include/"
    cmake_options+=("-DCMAKE_CUDA_FLAGS=-I$work/cublas/include" "-DCMAKE_CXX_FLAGS=-I$work/cublas/include")
    export LD_LIBRARY_PATH=$packages${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    echo "$packages" > "$work/cublas/runtime-folder"
}
# A later call without the build part needs the folder too.
if [[ -f $work/cublas/runtime-folder ]]; then
    export LD_LIBRARY_PATH=$(cat "$work/cublas/runtime-folder")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

choose_pair_folder() {
    if [[ -n $pair ]]; then
        pair=$(realpath -m "$pair")
        return
    fi
    local free
    free=$(df --output=avail -B1G /dev/shm 2> /dev/null | tail -n 1 || echo 0)
    pair=$work/pair
    ((free >= 32)) && pair=/dev/shm/pydflash-pair
    return 0
}

make_pair() {
    # shellcheck disable=SC2086 # a list of numbers
    "$python" "$repo/scripts/make_random_pair.py" "$pair" --size "$size" --acceptance all none --window $windows
}

configure() {
    cmake_options=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DSKBUILD=ON "-DPython_EXECUTABLE=$(command -v "$python")" "-DDFLASH_GGML_DIR=$ggml")
    source_folder=$repo
    if ((cuda)); then
        cmake_options+=(-DDFLASH_CUDA=ON)
        cublas_options
    fi
    if ((llama)); then
        # One project around both: llama.cpp then takes the ggml that pydflash has already declared.
        source_folder=$work/both
        mkdir -p "$source_folder"
        cat > "$source_folder/CMakeLists.txt" << CMAKE
cmake_minimum_required(VERSION 3.26)
project(pydflash_and_llama C CXX)
set(BUILD_SHARED_LIBS OFF)
add_subdirectory("$repo" pydflash)
add_subdirectory("$tree" llama)
CMAKE
        for option in TESTS EXAMPLES APP UI; do cmake_options+=("-DLLAMA_BUILD_$option=OFF"); done
        for option in COMMON TOOLS SERVER; do cmake_options+=("-DLLAMA_BUILD_$option=ON"); done
        cmake_options+=(-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_ALL_WARNINGS=OFF)
    fi
    part configure cmake -S "$source_folder" -B "$build" "${cmake_options[@]}"
}

date --utc >> "$log"
((cuda)) && command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
choose_pair_folder

pair_process=""
if has pair; then
    note "pair in $pair, in the background"
    (make_pair > "$work/pair.log" 2>&1) &
    pair_process=$!
fi

if has configure || has build; then
    "$python" -c 'import cffi, sys; sys.exit(cffi.__version_info__ < (2, 1))' || die "the build needs cffi >= 2.1: carry it in --wheels"
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [[ -f $headers/Python.h ]] || die "no Python.h in $headers"
    unpack
    configure
fi

if has build; then
    targets=(dflash _native)
    ((llama)) && targets+=(llama-bench llama-server)
    quiet_part build ninja -C "$build" -j "$jobs" "${targets[@]}"
    [[ -f $build/pydflash/cmake_install.cmake ]] && built=$build/pydflash || built=$build
    echo "$built" > "$work/built"
fi

if has install; then
    [[ -f $work/built ]] || die "nothing is built in $work"
    rm -rf "$site"
    part install cmake --install "$(cat "$work/built")" --prefix "$site"
    cp -r "$repo/pydflash/." "$site/pydflash/"
    (cd / && "$python" -c 'import pydflash; print(pydflash.__file__, *pydflash.devices(), sep="\n")')
fi

if has test; then
    cd "$repo"
    # Without this a backend that finds no GPU would have all tests skipped.
    ((cuda)) && export PYDFLASH_TEST_DEVICE=${PYDFLASH_TEST_DEVICE:-CUDA0}
    # The machine's own plugins may not fit this pytest.
    export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
    # -P: the package that was built is tested, not the source tree.
    # shellcheck disable=SC2086 # words for pytest
    part test "$python" -P -m pytest -q -p no:cacheprovider $test_words
fi

if [[ -n $pair_process ]]; then
    wait "$pair_process" || { cat "$work/pair.log"; die "the pair could not be written"; }
    part pair cat "$work/pair.log"
fi

if has bench; then
    device=$( ((cuda)) && echo cuda || echo cpu)
    words=(--pair "$pair" --device "$device" --json "$out/bench.json")
    if ((llama)); then
        binaries=$(dirname "$(find "$build" -name llama-server -type f | head -n 1)")
        [[ -x $binaries/llama-bench ]] || die "no llama-bench and llama-server in $build"
        words+=(--vs "$binaries")
    fi
    # shellcheck disable=SC2086 # words for the program
    part bench "$python" "$repo/scripts/bench_gpu.py" "${words[@]}" $bench_words
    if "$python" -c 'import matplotlib' 2> /dev/null; then
        "$python" "$repo/scripts/plot_bench.py" "$out/bench.json" "$out"
    fi
fi
note "done"
