#!/usr/bin/env bash
# One part of a session on a rented GPU machine, with a time limit on every program and its results in few, small files.
#
#     scripts/gpu/session.sh PART [OUT] [more arguments for the part's programs]
#
# PART: checkpoint-x2 | parallel-x2 | tests | evaluation | tune | kernels | grid | steps |
#   decoding | serving | loader | automatic | kept-x2 | llama-x2 | float8 | convergence | curves | reduction-x2 | compare | eight | stages
# OUT (default: $OUT, else session/) gets PART.txt (each program, its exit status and seconds), PART.log (all output) and
# PART.tar.gz (results), packed anew after each program. A program that fails or runs too long does not stop the others.
# WORK (default: runs/session/PART) has what the programs write. LIMIT: seconds for all of it (default 570); a program gets what is
# left, if that is less than its own limit.
# tune writes rows to runs/session/rows.yaml, by which kernels and steps then launch on the same machine.
# compare trains three models by the checkouts .base (or the folder named after OUT) and this one, in turn; the same call again
# on the same machine goes on where it ended. Before: git worktree add .base COMMIT, and .base among the ignored paths to carry.
# serving wants PYTHON, an interpreter that has vLLM, in VLLM (benchmarks/peers/vllm.py says how); loader wants boto3 among the wheels.
# automatic measures five models, or those named in ONLY. kept-x2, llama-x2 and float8 go on where an earlier call on the same machine
# ended. llama-x2 wants TORCHTITAN, as eight does.
# eight measures on all GPUs of the machine by benchmarks many_gpus, what there is time for (or some: eight OUT --only llama context);
# the same call again goes on. It wants PYTHON, an interpreter that has torchtitan, in TORCHTITAN.
# stages goes on where an earlier call on the same machine ended: stages OUT mpt-7b llama3-8b zamba2-2.7b.
# evaluation wants the tasks' JSONL files in icl/; it, kernels and steps the public packages in peers/. Wheels in .whl/ are installed first.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

part=${1:-}
case $part in
checkpoint-x2 | parallel-x2 | tests | evaluation | tune | kernels | grid | steps | decoding) ;;
serving | loader | automatic | kept-x2 | llama-x2 | float8 | convergence | curves | reduction-x2 | compare | eight | stages) ;;
*)
    echo "no part '$part'; there is checkpoint-x2, parallel-x2, tests, evaluation, tune, kernels, grid, steps," \
        "decoding, serving, loader, automatic, kept-x2, llama-x2, float8, convergence, curves, reduction-x2, compare, eight, stages" >&2
    exit 2
    ;;
esac
out=${2:-${OUT:-session}}
shift $(($# < 2 ? $# : 2))
limit=${LIMIT:-570}
work=${WORK:-runs/session/$part}
mkdir -p "$out" "$work"
log=$out/$part.log summary=$out/$part.txt rows=$PWD/runs/session/rows.yaml

if compgen -G '.whl/*.whl' >/dev/null; then
    # shellcheck disable=SC1091
    source scripts/gpu/setup.sh
else
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
fi
python=${PYTHON:-python3}

say() { echo "$*" | tee -a "$summary"; }

step() { # step NAME SECONDS COMMAND...: runs it, in a time limit; reports; packs what there is
    local name=$1 seconds=$2 began=$SECONDS status=0 left=$((limit - SECONDS)) from
    shift 2
    if ((left < 30)); then
        say "$name: left out, no time left"
        return
    fi
    printf '\n== %s: %s\n' "$name" "$*" >>"$log"
    from=$(wc -c <"$log")
    timeout -k 10 $((seconds < left - 15 ? seconds : left - 15)) "$@" >>"$log" 2>&1 </dev/null || status=$?
    tail -c "+$from" "$log" | tail -n 25
    case $status in
    124 | 137) say "$name: status $status (time limit), $((SECONDS - began)) s" ;;
    *) say "$name: status $status, $((SECONDS - began)) s" ;;
    esac
    pack
}

pack() { # weights and shards are large and say nothing
    tar -C "$(dirname "$work")" -czf "$out/$part.tar.gz.$BASHPID" --exclude=checkpoints --exclude='*.safetensors' --exclude=exported \
        --exclude=data "$(basename "$work")" && mv "$out/$part.tar.gz.$BASHPID" "$out/$part.tar.gz"
}

checkpoint_x2() { # goes on where an earlier call on the same machine ended
    step moving 500 "$python" scripts/gpu/moving_checkpoint.py "$work/moving" "$@"
}

parallel_x2() { # issue 24; Llama-3-8B with 20 of its 32 layers, which two GPUs of 80 GB hold with AdamW
    export TORCHINDUCTOR_COMPILE_THREADS=8 # the cores are shared by ranks; part of the key of what is compiled
    local bench=("$python" -m benchmarks parallel) keep=train.activation_checkpointing.type
    local two=(--nproc 2 train.sharding.strategy=full train.global_batch_size=16)
    local zamba2=(yamls/pretrain/zamba2-2.7b.yaml "$keep=kernels" train.global_batch_size=16)
    local context=("${zamba2[@]}" "${two[@]}" train.microbatch_size=1 train.parallel.context=2)
    local short=("${zamba2[@]}" "${two[@]}" data.seq_len=4096 train.microbatch_size=8) one=("${zamba2[@]}" train.microbatch_size=1)
    local llama=(yamls/pretrain/llama3-8b.yaml "$keep=selective" "${two[@]}" data.seq_len=8192)
    local fsdp2=("${llama[@]}" train.microbatch_size=1) tensor=("${llama[@]}" train.microbatch_size=2 train.parallel.tensor=2)
    # Every shape compiles anew: all of them beside each other, by models of a few layers, whose graphs are those of the whole.
    local few=(--steps 0 --warmup 1 'model.layers=m s+m s+m') short_llama=(--steps 0 --warmup 1 'model.layers=attn*2' model.vocab_size=4096)
    warm() {
        "${bench[@]}" "${context[@]}" "${few[@]}" --lengths 65536 --out "$work/warm/context.json" &
        "${bench[@]}" "${short[@]}" "${few[@]}" --out "$work/warm/short.json" &
        "${bench[@]}" "${one[@]}" "${few[@]}" --lengths 32768 65536 --out "$work/warm/one.json" &
        "${bench[@]}" "${tensor[@]}" "${short_llama[@]}" train.parallel.async_tensor=on --out "$work/warm/async.json" &
        "${bench[@]}" "${tensor[@]}" "${short_llama[@]}" train.parallel.async_tensor=off --out "$work/warm/tensor.json" &
        "${bench[@]}" "${fsdp2[@]}" "${short_llama[@]}" --out "$work/warm/fsdp2.json" &
        wait
    }
    export -f warm
    step warm 85 bash -c "$(declare -p bench context short one tensor fsdp2 few short_llama work); warm"
    step zamba2-context 110 "${bench[@]}" "${context[@]}" --lengths 65536 --out "$work/zamba2-context.json"
    step zamba2-short 70 "${bench[@]}" "${short[@]}" --out "$work/zamba2-short.json"
    step zamba2-one-gpu 80 "${bench[@]}" "${one[@]}" --lengths 32768 65536 --steps 1 --warmup 1 --out "$work/zamba2-one.json"
    step llama-async 55 "${bench[@]}" "${tensor[@]}" 'model.layers=attn*20' train.parallel.async_tensor=on --out "$work/llama-async.json"
    step llama-fsdp2 50 "${bench[@]}" "${fsdp2[@]}" 'model.layers=attn*20' --out "$work/llama-fsdp2.json"
    step llama-tensor 50 "${bench[@]}" "${tensor[@]}" 'model.layers=attn*20' train.parallel.async_tensor=off --out "$work/llama-tensor.json"
    step scan 70 "${bench[@]}" --scan --nproc 2 --out "$work/scan.json"
    step zamba2-kernels 110 "${bench[@]}" "${context[@]}" --lengths 65536 --steps 1 --warmup 1 --kernels --out "$work/zamba2-kernels.json"
    step zamba2-longest 90 "${bench[@]}" "${context[@]}" --lengths 131072 --steps 1 --warmup 1 --out "$work/zamba2-longest.json"
}

tests() {
    # Each worker would start compiler processes of its own, more than there are cores.
    TORCHINDUCTOR_COMPILE_THREADS=1 step gpu-tests 300 "$python" -m pytest tests/gpu -m "not slow" -q -n "${WORKERS:-12}" \
        --dist loadgroup -p no:cacheprovider --durations=15 --junitxml="$work/gpu-tests.xml"
    step bench-checkpoint 200 "$python" -m benchmarks checkpoint yamls/bench/mpt-1b.yaml "$work/saved" \
        train.compile=off train.microbatch_size=4 --saves 2 "$@" # 16 without compiling may not fit
    rm -rf "$work/saved"
    step doctor 60 "$python" -m llmtrain doctor
}

evaluation() {
    public_packages # by which the harness's transformers runs Zamba2
    # Both write after every task, ours first: half of the time for each loses the harness's last tasks at most.
    local common=(--data-dir icl --peer-seconds 20) each=$(((limit - SECONDS) / 2))
    step evaluation-zamba2 $each "$python" -m benchmarks evaluation yamls/pretrain/zamba2-1.2b.yaml "${common[@]}" \
        --out "$work/evaluation-zamba2.json" "$@"
    step evaluation-mpt $each "$python" -m benchmarks evaluation yamls/bench/mpt-1b.yaml "${mpt_hf[@]}" "${common[@]}" \
        --out "$work/evaluation-mpt.json" "$@"
}

tune() { # [attention | ssd ...]
    local operation head_dim d_state
    for operation in "${@:-attention}"; do
        case $operation in
        attention) for head_dim in 128 64; do
            step "tune-attention-$head_dim" 270 "$python" -m llmtrain bench tune --operation attention --quick \
                --shape "head_dim=$head_dim" --variant plain --out "$rows"
        done ;;
        ssd) for d_state in 128 64; do
            step "tune-ssd-$d_state" 270 "$python" -m llmtrain bench tune --operation ssd --quick \
                --shape head_dim=64 "d_state=$d_state" --out "$rows"
        done ;;
        *) step "tune-$operation" 200 "$python" -m llmtrain bench tune --operation "$operation" --quick --out "$rows" ;;
        esac
        [[ -f $rows ]] && cp "$rows" "$work/"
    done
}

public_packages() { # the folder of peers, in which causal-conv1d's sources are built once for a machine
    local built=$PWD/runs/session/built
    [[ -d peers ]] || return
    [[ -d peers/causal-conv1d && ! -d $built/causal_conv1d ]] &&
        step build-causal-conv1d 120 "$python" scripts/gpu/build_causal_conv1d.py peers/causal-conv1d "$built"
    export PYTHONPATH=$PYTHONPATH:$built:$PWD/peers
}

kernels() {
    [[ -f $rows ]] && export LLMTRAIN_TUNING=$rows
    public_packages
    # Apart, so that a scan that breaks the GPU or compiles for long does not cost attention's figures.
    step kernels-attention 220 "$python" -m llmtrain bench kernels --only attention rotary norm \
        --compile-seconds 100 --out "$work/attention" "$@"
    step kernels-scan 400 "$python" -m llmtrain bench kernels --only ssd conv1d gated_norm mixer --draws 4 \
        --compile-seconds 150 --out "$work/scan" "$@"
}

steps() {
    [[ -f $rows ]] && export LLMTRAIN_TUNING=$rows
    public_packages
    local short=('train.duration=10 steps' 'schedule.warmup=2 steps' --kernels ours public)
    step steps-mpt 260 "$python" -m benchmarks steps yamls/bench/mpt-1b.yaml train.global_batch_size=32 "${short[@]}" \
        --out "$work/steps-mpt.json" "$@"
    step steps-zamba2 400 "$python" -m benchmarks steps yamls/pretrain/zamba2-2.7b.yaml train.global_batch_size=8 \
        train.microbatch_size=2 "${short[@]}" --out "$work/steps-zamba2.json" "$@"
}

decoding() {
    step decoding-zamba2 300 "$python" -m benchmarks decoding yamls/pretrain/zamba2-1.2b.yaml --batch 64 --new 120 "$@"
    step decoding-mpt 200 "$python" -m benchmarks decoding yamls/bench/mpt-1b.yaml "${mpt_hf[@]}" --batch 64 --new 120 "$@"
}

serving() {
    local options='{"attention_config": {"backend": "TRITON_ATTN"}, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}'
    step serving "$limit" "$python" -m benchmarks serving --vllm "${VLLM:?}" --batch 1 8 64 --vllm-options "$options" \
        yamls/pretrain/mamba2-1.3b.yaml yamls/bench/nemotron-h-1b.yaml yamls/pretrain/zamba2-1.2b.yaml --out "$work/models" "$@"
}

loader() { # the share of a step spent waiting for data, from a store on this machine that answers after 50 ms
    step loader-wait 150 "$python" -m benchmarks loader wait yamls/pretrain/mpt-125m.yaml --steps 36 --shard-mb 2 \
        train.microbatch_size=64 train.cuda_graphs=on "$@"
}

automatic() { # microbatch_size: auto and activation_checkpointing: auto beside a sweep by hand
    local name batch seq_len sweep
    while read -r name batch seq_len sweep; do
        [[ " ${ONLY:-$name} " == *" $name "* ]] || continue
        # shellcheck disable=SC2086
        step "automatic-$name" 200 "$python" -m benchmarks automatic "yamls/pretrain/$name.yaml" train.sharding.strategy=auto \
            train.global_batch_size="$batch" --seq-len "$seq_len" --sweep $sweep --seconds 80 --out "$work/$name.json" "$@"
    done <<'MODELS'
mpt-3b 8 2048 none:8,4 selective:8
mpt-1b 16 2048 none:16,8 selective:16
llama3-1b 8 8192 none:8,4 selective:8
zamba2-1.2b 8 4096 none:8,4 selective:8
mamba2-370m 32 2048 none:16,8 selective:32
MODELS
}

kept_x2() { # tokens/s per GPU on two GPUs and on each of them, default sharding, the same batch
    step kept "$limit" "$python" -m benchmarks kept "$work/kept" --gpus 2 --seconds $((limit - SECONDS - 25)) \
        --case yamls/pretrain/zamba2-2.7b.yaml 4096 2 16 --case yamls/bench/mpt-1b.yaml 2048 16 "${MPT_BATCH:-128}" "$@"
}

llama_x2() { # Llama-3-8B beside torchtitan: float8, then bf16
    step llama "$limit" "$python" -m benchmarks many_gpus "$work/llama" --gpus 2 --timed 20 --llama-microbatches 4 \
        --only llama-float8 llama --seconds $((limit - SECONDS - 25)) --torchtitan "${TORCHTITAN:?}" "$@"
}

float8() { # float8 beside bf16 on one GPU: 16 of MPT-7B's layers, Zamba2-2.7B; then a profile of the former
    local wide=('train.activation_checkpointing={type: none}' model.layers=attn*16 train.microbatch_size=8 train.global_batch_size=32)
    sweep() { # NAME SECONDS MODEL SEQ_LEN SETTING...
        local name=$1 seconds=$2 model=$3 seq_len=$4
        shift 4
        mkdir -p "$work/$name"
        printf 'models: [%s]\nseq_lens: [%s]\nprecisions: [bf16, tensorwise]\nsteps: 20\nwarmup: 2\nsettings:\n' "$model" "$seq_len" \
            >"$work/$name/sweep.yaml"
        printf -- "- '%s'\n" "$@" >>"$work/$name/sweep.yaml"
        step "$name" "$seconds" "$python" -m llmtrain bench train "$work/$name/sweep.yaml" --out "$work/$name"
    }
    sweep mpt-7b 250 yamls/pretrain/mpt-7b.yaml 2048 "${wide[@]}" "$@"
    sweep zamba2 250 yamls/pretrain/zamba2-2.7b.yaml 4096 train.microbatch_size=2 "train.global_batch_size=${ZAMBA_BATCH:-16}" "$@"
    rm -rf "$work/profile"
    step profile 100 "$python" -m llmtrain.cli train yamls/pretrain/mpt-7b.yaml "${wide[@]}" run_dir="$work/profile" data.train=null \
        data.validation=null "data.prepare={sources: [stdlib], out: $work/mpt-7b/data/stdlib-4096-2048, vocab_size: 4096, seq_len: 2048}" \
        'train.float8={}' 'train.duration=500 steps' 'train.profile={steps: 1, after: 7, memory: true}' logging.step_times=10 "$@"
}

grid() { # what benchmarks/results/kernels/grid.csv lacks, ours first; a cell is measured again where its rows are taken out of the file
    public_packages
    local bench=("$python" -m benchmarks grid --out "$work/grid.csv")
    cp benchmarks/results/kernels/grid.csv "$work/"
    step grid-ours 170 "${bench[@]}" --only attention --backends triton --seconds 140 "$@"
    step grid-scan 200 "${bench[@]}" --only ssd others --seconds 170 "$@"
    step grid-public 200 "${bench[@]}" --only attention --backends sdpa:cudnn sdpa:flash varlen flex --seconds 170 "$@"
}

convergence() { # four models of about 100M parameters, 20 s of training each
    local site models=(yamls/pretrain/{mpt-125m,mamba2-130m}.yaml yamls/bench/zamba2-105m.yaml yamls/pretrain/gdn-130m.yaml)
    site=$("$python" -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    step convergence 300 "$python" -m benchmarks convergence "${models[@]}" --seconds 20 --sources stdlib \
        "$site"/{torch,transformers,sympy,scipy} --max-bytes 100000000 --out "$work/convergence" --set train.global_batch_size=32 \
        train.microbatch_size=32 'schedule={type: constant, warmup: 30 steps}' "$@"
}

curves() { # 2,000 steps of MPT-125M: bf16, float8, and Muon
    local model=yamls/pretrain/mpt-125m.yaml site
    site=$("$python" -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    step curves 300 "$python" -m benchmarks convergence "bf16=$model" "float8=$model" "muon=$model" --steps 2000 --seconds 120 \
        --sources stdlib "$site"/{torch,transformers,sympy,scipy} --max-bytes 100000000 --out "$work/curves" \
        --for float8 'train.float8={small_products: true, all_gather: false}' --for muon optimizer.type=muon --set train.global_batch_size=8 \
        train.microbatch_size=8 'schedule={type: cosine, warmup: 100 steps}' 'train.duration=2000 steps' "$@"
}

reduction_x2() { # MPT-125M on two GPUs, gradients summed in fp32 and in bf16, and fp32 once more: all beside each other
    local model=yamls/pretrain/mpt-125m.yaml site
    site=$("$python" -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))')
    step reduction "$limit" "$python" -m benchmarks convergence "fp32=$model" "bf16=$model" "fp32-twice=$model" --nproc 2 --beside \
        --steps 2000 --seconds $((limit - SECONDS - 90)) --sources stdlib "$site"/{torch,transformers,sympy,scipy} --max-bytes 60000000 \
        --out "$work/reduction" --for bf16 train.sharding.reduce_dtype=bf16 --set train.global_batch_size=8 train.microbatch_size=4 \
        'schedule={type: cosine, warmup: 100 steps}' 'train.duration=2000 steps' "$@"
}

eight() { # [--only PART …] [--try]
    step eight "$limit" "$python" -m benchmarks many_gpus "$work" --gpus "$(nvidia-smi -L | wc -l)" --seconds $((limit - SECONDS - 25)) \
        ${TORCHTITAN:+--torchtitan "$TORCHTITAN"} "$@"
}

stages() { # [MODEL ...]: pipeline stages beside FSDP2, on all GPUs of the machine
    export TORCHINDUCTOR_COMPILE_THREADS=8 # the cores are shared by ranks; part of the key of what is compiled
    local gpus model n parts mesh few
    gpus=$(nvidia-smi -L | wc -l)
    for model in "${@:-mpt-7b}"; do
        case $model in
        mpt-7b) few=('model.layers=attn*16') ;;
        llama3-8b) few=('model.layers=attn*12' data.seq_len=4096) ;;
        *) few=() ;;
        esac
        for mesh in '1 1' "$gpus 1" "$gpus 2" '2 1' '2 2'; do
            read -r n parts <<<"$mesh"
            [[ ! -f $work/$model-$n-$parts.json ]] &&
                step "stages-$model-$n-$parts" 120 "$python" -m benchmarks parallel "yamls/pretrain/$model.yaml" "${few[@]}" \
                    train.microbatch_size=1 train.global_batch_size=32 "train.parallel.pipeline=$n" "train.parallel.virtual_stages=$parts" \
                    --nproc "$gpus" --steps 2 --warmup 1 --microbatches 8 16 32 --out "$work/$model-$n-$parts.json"
        done
    done
}

compare() { # [BASE [more arguments]]
    local base=${1:-.base}
    shift $(($# < 1 ? $# : 1))
    local compare=("$python" scripts/gpu/compare_commits.py "$base" .)
    step compare-mpt 300 "${compare[@]}" yamls/bench/mpt-1b.yaml train.global_batch_size=32 --out "$work/mpt-1b" "$@"
    step compare-zamba2 400 "${compare[@]}" yamls/pretrain/zamba2-2.7b.yaml train.global_batch_size=8 \
        train.microbatch_size=2 --out "$work/zamba2-2.7b" "$@"
    step compare-mamba2 300 "${compare[@]}" yamls/pretrain/mamba2-1.3b.yaml train.global_batch_size=32 \
        train.microbatch_size=16 --out "$work/mamba2-1.3b" "$@"
}

# MPT-1B as MptForCausalLM can express it: ALiBi, no biases.
mpt_hf=('model.positions=none' 'model.norm.bias=false' 'model.blocks.attn.qkv_bias=false' 'model.blocks.attn.out_bias=false'
    'model.blocks.attn.mlp.bias=false' 'model.blocks.attn.position={type: alibi}')

: >"$log"
say "$part, $(git rev-parse --short HEAD 2>/dev/null || echo 'no git'), $(date -u +%FT%TZ), $(nvidia-smi -L 2>/dev/null | wc -l) GPU(s)"
case $part in
checkpoint-x2) checkpoint_x2 "$@" ;;
parallel-x2) parallel_x2 "$@" ;;
kept-x2) kept_x2 "$@" ;;
llama-x2) llama_x2 "$@" ;;
reduction-x2) reduction_x2 "$@" ;;
*) "$part" "$@" ;;
esac
say "$SECONDS s in all"
du -h "$out/$part".*
