#!/usr/bin/env bash
# Trains every run of results/, in order, makes rows of them, and draws the figures of the studies. It skips what is there,
# so after a stop the same command continues. Those that start from the weights of a run with other targets ("then" in
# runs/curriculum.jsonl, with its --init) need commit 4dff4b6.
#
#   bash results/reproduce.sh out/again          # about 80 core-hours, days on a laptop
#   bash results/reproduce.sh out/again --all    # the long runs too, which take weeks without a GPU
#
# Runs are trained one at a time, on all cores. Minutes are those of one core of an AMD EPYC (Zen 4), November 2026.
# shellcheck disable=SC2086  # flags are words
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?name a folder for the runs, say out/again}
runs="$folder/runs"

# trains the run NAME, where % is the seed, for each of SEEDS; if WHAT is circuit, it finds its circuit and draws it
make_runs() {  # MINUTES WHAT NAME SEEDS FLAGS
  local minutes=$1 what=$2 name=$3 seeds=$4 seed run
  shift 4
  for seed in $seeds; do
    run="$folder/${name//%/$seed}"
    echo "== $run, about $minutes minutes"
    [ -e "$run/model.pt" ] || python train.py --save-every 0 "$@" --seed "$seed" --out "$run" --resume
    if [ "$what" = circuit ] && [ ! -e "$run/attention_maps.png" ]; then
      python ablate.py "$run"
      python analyze.py "$run"
    fi
  done
}
loss() { make_runs "$1" loss "${@:2}"; }
circuit() { make_runs "$1" circuit "${@:2}"; }

# the main command (circuits.md); in float32; until x_1 is learned, with RoPE and AdamW (circuits.md)
main="--layers 12 --heads 1 --D 3"
until="--eval-every 20 --stop-below 0.6"
circuit 8 runs/default/s% "$(seq 0 9)" $main --save-every 10
circuit 8 runs/default/s% "$(seq 10 19)" $main
circuit 8 runs/main/s% "$(seq 0 9)" $main --save-every 50
circuit 8 runs/fresh/default_s% "$(seq 30 39)" $main
circuit 20 runs/onset/s% "1 2 3" $main --dtype float32
loss 5 reads/rope_s% "$(seq 0 9)" $main --positions rope --save-every 10 $until
loss 9 reads/adamw_s% "0 1 2" $main --optimizer adamw --qk-std 0.02 --ema 0 --steps 3000 --save-every 20 $until

# W_Q and W_K start as small as all other weights (circuits.md)
circuit 8 runs/qk_std0.02/s% "$(seq 0 8)" $main --qk-std 0.02

# and the last weights instead of their average, ten times the weight decay, a little shorter (circuits.md)
plain="--qk-std 0.02 --ema 0"
short="$main $plain --steps 1050 --decay 0.4"
circuit 10 runs/last/s% "$(seq 0 4)" $main $plain
circuit 10 runs/last/s% "$(seq 5 10)" $main $plain --eval-every 20 --save-every 20
circuit 10 runs/decay/s% "$(seq 0 4)" $main $plain --weight-decay 1 --save-every 25
circuit 10 runs/shorter/s% "7 8 9" $short
circuit 10 runs/shorter/decay0.4_s% "0 3" $short --weight-decay 0.4

# again on another machine, an Intel Xeon, each run on one thread
circuit 7 runs/again/s% "0 1 2 3 4 5 6 8" $main $plain

# transformers A, B, C: the paper's optimizer in an eighth of its steps (circuits.md)
paper="$main $plain --optimizer adamw"
circuit 23 A 0 $paper --steps 3000
circuit 23 B 1 $paper --steps 3000
circuit 23 C 2 $paper --steps 3000
circuit 23 runs/adamw/s% "0 1 3" $paper --steps 3000 --save-every 20

# RoPE (circuits.md), and at twice the rate (paper.md)
rope="$paper --positions rope --steps 1600 --eval-every 20"
circuit 16 runs/rope/s% "$(seq 0 5)" $rope --save-every 20
loss 6 runs/rope/s% "$(seq 6 9)" $rope --stop-below 0.15
circuit 16 runs/rope/s% "$(seq 10 15)" $rope
circuit 19 runs/rope/steps3000_s% 0 $paper --positions rope --steps 3000
circuit 14 runs/rope_twice/s% "$(seq 0 9)" $paper --positions rope --lr 2e-3 --clip 0.3 --steps 1400 --decay 0.8

# without the implicit curriculum (curriculum.md), and in float32 (paper.md)
without="--targets last --steps 8000 --stop-below 0 --eval-every 400"
loss 53 runs/without_curriculum/L12_s% 0 $paper $without
loss 59 runs/without_curriculum/L12_rope_s% 0 $paper --positions rope $without
loss 18 runs/without_curriculum/L4_s% 0 $paper --layers 4 --heads 8 $without
loss 19 runs/without_curriculum/L4_rope_s% 0 $paper --layers 4 --heads 8 --positions rope $without
loss 22 runs/float32/s% "0 1 2" $main $plain --dtype float32

# which part of the implicit curriculum is needed (curriculum.md): subsets of the symbols
small="$plain --layers 4 --heads 4 --width 64 --lr 4e-3 --steps 2400 --decay 0.3 --stop-below 0.1"
for targets in "1 2 3" "1" "2" "3" "1 2" "1 3" "2 3"; do
  loss 6 "runs/curriculum/D3_targets${targets// /-}_s%" "0 1 2 3" $small --targets ${targets// /,}
done
for targets in "1 2 3" "1 3"; do
  loss 6 "runs/curriculum/D3_targets${targets// /-}_s%" "4 5 6 7" $small --targets ${targets// /,} --dtype float32
done
for D in 2 5; do
  loss 4 "runs/curriculum/D${D}_all_s%" "0 1" $small --D $D
  loss 9 "runs/curriculum/D${D}_last_s%" 0 $small --D $D --targets last
done
loss 9 runs/curriculum/D5_targets1-2-4-5_s% 0 $small --D 5 --targets 1,2,4,5
loss 9 runs/curriculum/D5_targets2-3-4-5_s% 0 $small --D 5 --targets 2,3,4,5

# conditional retrieval (curriculum.md): two schedules, RoPE, other target symbols, fewer layers; again on another machine
both="$plain --task extras.studies.tables:Conditional --width 64 --lr 4e-3"
four="$both --layers 4 --heads 4"
brief="--steps 2500 --decay 0.4"
long="--steps 4000 --decay 0.3"
asked="--steps 2000 --decay 0.4 --stop-below 0.1"
circuit 15 runs/conditional/all_s% "$(seq 0 4)" $four $brief --save-every 25
circuit 20 runs/conditional/long_s% "2 4 5 6" $four $long --save-every 40
loss 10 runs/conditional/qk_s% 4 $four --positions rope $brief --save-every 25
loss 8 runs/conditional/z_s% 0 $four $asked --targets last
loss 8 runs/conditional/x-z_s% 0 $four $asked --targets 1,3
loss 20 runs/conditional/x-z_s% 2 $four $long --stop-below 0.1 --targets 1,3
loss 20 runs/conditional/y-z_s% "0 2" $four $long --stop-below 0.1 --targets 2,3
loss 12 runs/conditional/all_L2_s% 0 $both $long --layers 2 --heads 4
loss 16 runs/conditional/all_L3_s% 0 $both $long --layers 3 --heads 4
circuit 20 runs/again/conditional_s% "5 6" $four $long
circuit 15 runs/again/conditional_all_s% 0 $four $brief

# the main command at half the width, with weight decay from 0.1 to 5 e-folds (circuits.md)
narrow="$plain --layers 12 --heads 1 --width 64 --lr 2e-3 --stop-below 0"
for folds_decay in "0.1 0.043" "0.3 0.13" "1 0.434" "2.4 1.043" "5 2.172"; do
  read -r folds decay <<< "$folds_decay"
  decay="--steps 1600 --weight-decay $decay"
  loss 6 "runs/cleaning/muon_e${folds}_s%" "0 1 2" $narrow $decay
  loss 6 "runs/cleaning/adamw_rope_e${folds}_s%" "0 1 2" $narrow $decay --optimizer adamw --positions rope
done
loss 6 runs/cleaning/adamw_rope_e0.1_s% "3 4 5 6" $narrow --steps 1600 --weight-decay 0.043 --optimizer adamw --positions rope
loss 6 runs/cleaning/muon_e0.3_s% "$(seq 3 9)" $narrow --steps 1600 --weight-decay 0.13 --save-every 20
loss 12 runs/cleaning/time_s% 0 $narrow --steps 3000 --decay 0.1 --weight-decay 0.2 --save-every 100

# long chains, a second round of reading ahead (depth.md); these ran on an H200, but for five layers' seed 0
circuit 40 runs/ahead/L12_H1_D7_s% "$(seq 0 4)" --layers 12 --heads 1 --D 7 --steps 3000
for shape in "3 7" "4 7" "4 8" "5 8"; do
  read -r layers D <<< "$shape"
  circuit 25 "runs/ahead/L${layers}_H4_D${D}_s%" "$(seq 0 4)" --layers $layers --heads 4 --D $D --steps 8000 --eval-every 200
done

# with and without a mask (depth.md); three layers of four heads ran on an H200, and seed 0 of those of two; the circuits are
# of the runs of two layers of four heads that solve the task: seed 4, and without a mask seeds 2 and 4
for shape in "2 2 2" "2 4 2" "3 2 4" "3 4 4"; do
  read -r layers heads D <<< "$shape"
  flags="--layers $layers --heads $heads --D $D --steps 6000 --eval-every 200"
  loss 5 "runs/mask/L${layers}_H${heads}_D${D}_s%" "$(seq 0 4)" $flags
  loss 5 "runs/mask/L${layers}_H${heads}_D${D}_no-causal_s%" "$(seq 0 4)" $flags --no-causal
done
two="--layers 2 --heads 4 --D 2 --steps 6000 --eval-every 200"
circuit 1 runs/mask/L2_H4_D2_s% 4 $two
circuit 1 runs/mask/L2_H4_D2_no-causal_s% "2 4" $two --no-causal

# RoPE with the other settings of the main command (circuits.md)
circuit 4 runs/rope_muon/s% "$(seq 0 9) $(seq 40 49)" $main --positions rope --save-every 25

# and other schedules, averages and clippings (circuits.md); base and --steps 800 ran on an Intel Xeon for seeds 10-12
for flag in base "steps 800" "decay 0.7" "ema 0.95" "ema 0.99" "clip 1" "clip 0"; do
  with="--$flag"
  [ "$flag" = base ] && with=""
  loss 4 "runs/tail/${flag// /}_s%" "10 11 12" $main --positions rope --eval-every 25 $with
done
loss 4 runs/tail/steps800_s% "$(seq 40 49)" $main --positions rope --steps 800

# Figure 4, the --preset night in a quarter of its steps (paper.md): about 70 core-minutes a seed, and 35 for the last symbol alone
python sweep.py --preset night --steps 2500 --out "$folder/sweep"
python sweep.py --preset laptop --seed 0 1 --out "$runs/laptop"

# two and three layers beyond the law, and with RoPE (depth.md)
few="--heads 8 --head-size 32 --stop-below 0.002 --eval-every 100"
loss 8 runs/addresses/L2_H8_N2_D3_s% "$(seq 11 15)" $few --layers 2 --N 2 --D 3 --steps 3000
loss 9 runs/addresses/L3_H8_N2_D4_s% "$(seq 11 15)" $few --layers 3 --N 2 --D 4 --steps 5000
loss 8 runs/addresses/L2_H8_N4_D2_s% "$(seq 11 15)" $few --layers 2 --D 2 --steps 10000
loss 8 runs/addresses/rope_s% "0 1" $main --positions rope

# two steps, from 2 to 24 places of a pair (depth.md)
more="--heads 8 --head-size 32 --N 2 --D 2 --steps 4000 --eval-every 100"
for layers in 2 3; do
  loss 1 runs/addresses/L${layers}_H8_N2_D2_s% "1 2 3" $more --layers $layers
  for number in 9 21; do
    task="--task extras.studies.places:random$number"
    loss 10 runs/addresses/L${layers}_H8_N2_D2_random${number}_s% "1 2 3" $more --layers $layers $task
  done
done

# pairs in other orders (depth.md)
shuffled="--task extras.studies.tables:Shuffled"
forward="--task extras.studies.tables:Forward"
for layers in 3 4; do
  three="--layers $layers --heads 4 --N 2 --D 3 --steps 2500 --save-every 50"
  loss 1 runs/directions/L${layers}_H4_backward_s% "$(seq 11 15)" $three
  loss 3 runs/directions/L${layers}_H4_shuffled_s% "$(seq 11 15)" $three $shuffled
  loss 3 runs/directions/L${layers}_H4_forward_s% "$(seq 11 15)" $three $forward
done
loss 12 runs/directions/L3_H4_forward10000_s% "11 12" --layers 3 --heads 4 --N 2 --D 3 --steps 10000 $forward
loss 9 runs/directions/L12_H1_shuffled_s% "0 1" $main $shuffled
loss 9 runs/directions/L12_H1_forward_s% "0 1" $main $forward

# two layers without MLPs (depth.md)
loss 5 runs/addresses/L2_H8_N4_D2_no-mlp_s% "11 12 13" --layers 2 --heads 8 --head-size 32 --D 2 --no-mlp --steps 4000 --eval-every 100

# many depths without averaging (depth.md): 115 and 30 core-minutes; then two and three layers with more steps: 70 and 125
eight="$plain --heads 8 --lr 2e-3 --decay 0.3 --stop-below 0"
grid="$eight --D 5"
python sweep.py --layers 5 4 3 2 1 --seed 0 1 2 $grid --steps 1500 --out "$folder/plain"
python sweep.py --layers 5 3 1 --seed 0 1 2 $eight --targets last --steps 1500 --out "$folder/plain"
python sweep.py --layers 2 3 4 --seed 0 1 $grid --steps 2000 --no-causal --positions rope --out "$folder/plain"
python sweep.py --layers 2 3 --seed $(seq 0 9) $grid --steps 5000 --out "$folder/longer"
for layers in 2 3 4; do
  circuit 5 "runs/depth/L${layers}_s%" 1 $grid --layers $layers --steps 1500
done

# heads and layers (depth.md): about 5 minutes a run of one layer, 12 of two, 45 of three with 12,000 steps; its row is added to
# runs/depth_width.jsonl by `python -m extras.studies.depth RUN`, if there is none
diagram() {  # LAST_SEED LAYERS N D STEPS HEADS FLAGS, where N, D and HEADS may be several, 8,16
  local layers=$2 steps=$5 N D heads kind
  kind=$(sed 's/[a-z.]*://; s/ //g; s/.*/\L&/' <<< "${*:7}")  # --task a.b:Shuffled is --taskshuffled
  kind=${kind/--/_}
  [ "$steps" -gt 4000 ] && kind="${kind}_steps$steps"
  for N in ${3//,/ }; do for D in ${4//,/ }; do for heads in ${6//,/ }; do
    loss 5 "depth_width/L${layers}_H${heads}_N${N}_D$D${kind}_s%" "$(seq 1 "$1")" --layers $layers --heads $heads --head-size 32 \
      --N $N --D $D --steps $steps --stop-below ${stop:-0.002} --eval-every 100 "${@:7}"
  done; done; done
}
for shape in "6 1 2 1 3000 1" "5 1 2 1 3000 2,3,4,5,8,16" "5 1 4 1 4000 1,16" "6 1 4 1 4000 2,3,4,5,8" "5 1 8 1 4000 1,2,3,4,5,8,9,16" \
  "5 2 4 1 4000 4" "5 1 16 1 2000 4" "5 1 2 2 3000 16" "5 1 2 2 10000 16" "5 1 4 2 4000 16" "5 2 4 2 2000 1" "5 2 4 2 2500 2,3,4,5,8" \
  "6 2 4 2 2500 16" "10 2 4 2 10000 1" "5 2 4 2 10000 8" "5 2 16 2 10000 4" "5 2 2 3 3000 8,16" "5 2 3 3 4000 8" "1 2 4 3,4 2500 16" "5 2 4 3 6000 16" \
  "5 2 4 3 12000 8,16" "5 3 4 2 2500 8" "5 3 4 3 12000 8" "5 3 4 4 2500 4" "1 3 4 4 2500 16" "3 3 4 4 4500 4" \
  "5 3 4 4 12000 4,16" "5 3 2 5,7 5000 8" \
  "5 1 4 1 4000 8 --no-mlp" "5 2 4 2 2500 8 --no-mlp" "6 2 4 2 10000 8 --no-mlp" "5 1 4 1 4000 1,2,3,4,5,8,16 --positions rope" \
  "5 2 4 2 2500 4 --task extras.studies.tables:Shuffled" "9 2 4 2 10000 4 --task extras.studies.tables:Shuffled" "5 3 4 2,4 2500 4 --task extras.studies.tables:Shuffled" \
  "1 1 3 1 4000 3,4,6" "1 1 6 1 4000 6,7,12" "1 1 2 1 3000 1,2 --head-size 64" "1 1 2 1 3000 2 --head-size 8" "1 1 2 1 3000 2,4 --head-size 4" \
  "1 1 4 1 4000 2,4 --head-size 64" "1 1 4 1 4000 4,8,16 --head-size 8" "1 1 4 1 4000 4,8,16 --head-size 4" "1 1 8 1 4000 4,8 --head-size 64" \
  "1 1 8 1 4000 16 --head-size 8" "1 1 8 1 4000 16,32 --head-size 4" "5 1 2 1 4000 8 --task extras.studies.places:fixed20" "3 1 2 1 4000 8 --task extras.studies.places:random4" \
  "3 1 2 1 4000 8 --task extras.studies.places:random6" "3 1 2 1 4000 8,16 --task extras.studies.places:random8" "5 1 2,4 1 4000 8,16 --task extras.studies.places:random20"; do
  diagram $shape
done

# pairs among distractors in two layers, where the first seed went to 0.002
stop=0.01 diagram 3 2 2 1 4000 8 --task extras.studies.places:fixed20
stop=0.01 diagram 3 2 2 1 10000 4 --task extras.studies.places:random12
stop=0.01 diagram 5 2 2,4 1 4000 8,16 --task extras.studies.places:random20

# heads against places: from scratch, and each number of places from the weights of the one before
one="--layers 1 --head-size 32 --N 2 --D 1 --eval-every 100"
for heads in 8 16 32; do
  for seed in 1 2 3; do
    before="$folder/depth_width/scratch9_H${heads}_s$seed"
    for distractors in 6 8 12 20; do
      name="$((distractors + 3))_H${heads}_s%"
      flags="$one --heads $heads --task extras.studies.places:random$distractors"
      loss 5 "depth_width/scratch$name" $seed $flags --steps 10000
      [ $distractors = 6 ] && continue
      loss 5 "depth_width/led$name" $seed $flags --steps 5000 --init "$before"
      before="$folder/depth_width/led${name//%/$seed}"
    done
  done
done

# the same with N = 4, and x_2 in one layer, from N = 2 over 3 to 4
one="--layers 1 --heads 16 --head-size 32 --eval-every 100"
for seed in 1 2 3; do
  for distractors in 4 8; do
    loss 5 "depth_width/scratch$((distractors + 7))_H16_N4_s%" $seed $one --N 4 --D 1 --task extras.studies.places:random$distractors --steps 10000
  done
  for step in "scratch11_H16_N4 led13_H16_N4 --N 4 --D 1 --task extras.studies.places:random6" "led13_H16_N4 led15_H16_N4 --N 4 --D 1 --task extras.studies.places:random8" \
    "L1_H16_N2_D2_steps10000 L1_H16_N3_D2_led --N 3 --D 2 --stop-below 0.002" \
    "L1_H16_N3_D2_led L1_H16_N4_D2_led --N 4 --D 2 --stop-below 0.002"; do
    read -r before after flags <<< "$step"
    loss 5 "depth_width/${after}_s%" $seed $one $flags --steps 5000 --init "$folder/depth_width/${before}_s$seed"
  done
done

# the circuits of some of these (circuits.md)
one="--layers 1 --head-size 32 --D 1 --steps 4000 --stop-below 0.002 --eval-every 100"
circuit 5 runs/one_layer/L1_H5_N4_D1_s% 1 $one --heads 5
circuit 5 runs/one_layer/L1_H8_N4_D1_s% 1 $one --heads 8
circuit 5 runs/fresh/one_layer_s% "$(seq 30 35)" $one --heads 16
circuit 5 runs/one_layer/L1_H16_N8_D1_s% "$(seq 2 11)" $one --heads 16 --N 8
circuit 15 runs/shuffled/L3_H4_N4_D2_taskshuffled_s% "$(seq 1 5)" --layers 3 --heads 4 --head-size 32 --D 2 --steps 2500 \
  --stop-below 0.002 --eval-every 100 --task extras.studies.tables:Shuffled

# models of too few layers, and three metrics (paper.md)
short="$plain --heads 8 --steps 1500 --stop-below 0 --lr 2e-3 --decay 0.3"
loss 1 metrics/L1_D3_s% "0 1 2" $short --layers 1
loss 1 metrics/L1_D5_s% "0 1 2" $short --layers 1 --D 5
loss 4 metrics/L2_D5_s% "0 1 2" $short --layers 2 --D 5
loss 5 metrics/L1_H16_D2_s% 1 --layers 1 --heads 16 --head-size 32 --D 2 --steps 4000 --stop-below 0.002 --eval-every 100

# Figures 3 and 8, and the related systems (extras/mechanisms/README.md)
figures="$folder/figures"
python -m extras.studies.theory --figure "$figures/flow.png"
for name in memories recall bigrams noise hops joint attention; do
  [ -e "$folder/mechanisms/$name.jsonl" ] || python -m extras.mechanisms $name --out "$folder/mechanisms"
done

# rows of all runs, then the figures of studies
make_rows() {
  for group in "$runs"/*/; do
    python -m extras.studies.rows "$(basename "$group")" "$group"* --out "$runs"
  done
}
make_rows
python -m extras.studies.order "$runs"/default/s? "$folder"/reads/* --out "$figures"
python -m extras.studies.metrics "$folder"/metrics/* "$folder"/depth_width/L1_H16_N2_D2_s? "$folder"/A "$runs"/default/s0 --out "$figures"
python -m extras.studies.curriculum "$runs/curriculum.jsonl" --out "$figures"
python -m extras.studies.circuits "$folder"/[ABC] "$runs"/default/s0 --out "$figures"

[ "${2:-}" = --all ] || exit 0

# transformer D and the paper's literal settings (paper.md), then eight seeds of many depths, and the paper's own sweep
of_D="$plain --layers 24 --heads 1 --head-size 16 --width 512 --no-mlp --D 4 --batch 256 --steps 6400 --stop-below 0"
of_D="$of_D --optimizer adamw --save-every 20 --eval-every 40"
literal="$paper --steps 24000 --stop-below 0 --decay 0 --eval-every 100 --save-every 400"
circuit 83 D 0 $of_D
circuit 54 runs/rope/D_s% 0 $of_D --positions rope --steps 3000
loss 83 runs/literal/D_s% 0 $of_D --decay 0 --beta2 0.999 --clip 0 --warmup 0
loss 115 runs/literal/no_aid_s% "0 1 2" $literal --beta2 0.999 --clip 0 --warmup 0
depths="--layers 8 7 6 5 4 3 2 1 --steps 1500"
python sweep.py $depths --seed $(seq 0 7) $grid --out "$folder/plain"
python sweep.py $depths --seed 0 1 2 $eight --targets last --out "$folder/plain"
python sweep.py --preset paper --out "$folder/paper"
make_rows
python -m extras.studies.circuits "$folder/D" --out "$figures"

# two small language models; the packages, and how to serve them for answers.jsonl, are in extras/llm/README.md
for model in SmolLM2-135M-Instruct gemma-3-270m; do
  python -m extras.llm.weights choices --model $model --out "$folder/llm"
  python -m extras.llm.weights late --model $model --out "$folder/llm"
done
python -m extras.llm --plot "$folder"/llm/*.jsonl.gz --out "$folder/llm"
