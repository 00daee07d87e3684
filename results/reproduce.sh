#!/usr/bin/env bash
# Trains every run of results/, in order, makes rows of them, and draws the figures of the studies. It skips what is there, so
# after a stop the same command continues. Runs that start from the weights of another run with other targets ("then" in
# curriculum.md) need commit 4dff4b6, whose --init fits the output layer.
#
#   bash results/reproduce.sh out/again          # about 80 core-hours, days on a laptop
#   bash results/reproduce.sh out/again --all    # the long runs too, which take weeks without a GPU
#
# Runs are trained one at a time, on all cores. Minutes are those of one core of an AMD EPYC (Zen 4), November 2026.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?name a folder for the runs, say out/again}
runs="$folder/runs"
mkdir -p "$runs"/{default,onset,qk_std0.02,last,again,decay,shorter,adamw,rope,rope_twice,without_curriculum,float32,curriculum,conditional,cleaning,literal,depth}

# reads lines of MINUTES WHAT NAME FLAGS: trains a run of this name and, if WHAT is circuit, finds its circuit and draws it
make_runs() {
  while read -r minutes what name flags; do
    run="$folder/$name"
    echo "== $name, about $minutes minutes"
    # shellcheck disable=SC2086
    [ -e "$run/model.pt" ] || python -m extras.studies.stage train $flags --out "$run" --resume < /dev/null
    if [ "$what" = circuit ] && [ ! -e "$run/attention_maps.png" ]; then
      python ablate.py "$run" < /dev/null
      python analyze.py "$run" < /dev/null
    fi
  done
}

# the main command (circuits.md)
main="--layers 12 --heads 1 --D 3"
for seed in {0..9}; do
  echo "8 circuit runs/default/s$seed $main --seed $seed --save-every 10"
done | make_runs

# the main command in float32 (circuits.md); until x_1 is learned, with RoPE and AdamW (emergence.md)
for seed in 1 2 3; do
  echo "20 circuit runs/onset/s$seed $main --seed $seed --dtype float32"
done | make_runs
for seed in {0..9}; do
  echo "5 loss reads/rope_s$seed $main --rotary qk --save-every 10 --eval-every 20 --stop-below 0.6 --seed $seed"
done | make_runs
for seed in 0 1 2 10; do
  adamw="$main --optimizer adamw --qk-std 0.02 --ema 0 --steps 3000"
  echo "9 loss reads/adamw_s$seed $adamw --save-every 20 --eval-every 20 --stop-below 0.6 --seed $seed"
done | make_runs
# the same, where W_Q and W_K start as small as all other weights (emergence.md)
for seed in {0..8}; do
  echo "8 circuit runs/qk_std0.02/s$seed $main --qk-std 0.02 --seed $seed"
done | make_runs

# the same with the last weights instead of their average, and with ten times the weight decay (circuits.md, emergence.md)
plain="--qk-std 0.02 --ema 0"
for seed in {0..4}; do
  echo "10 circuit runs/last/s$seed $main $plain --seed $seed"
done | make_runs
for seed in {5..10}; do
  echo "10 circuit runs/last/s$seed $main $plain --seed $seed --eval-every 20 --save-every 20"
done | make_runs
for seed in {0..4}; do
  echo "10 circuit runs/decay/s$seed $main $plain --weight-decay 1 --seed $seed --save-every 25"
done | make_runs

# the first of these on another machine, an Intel Xeon, each run on one thread
for seed in 0 1 2 3 4 5 6 8; do
  echo "7 circuit runs/again/s$seed $main $plain --seed $seed"
done | make_runs

# the same, a little shorter (circuits.md)
for seed in 7 8 9; do
  short="$plain --steps 1050 --decay 0.4"
  echo "10 circuit runs/shorter/s$seed $main $short --seed $seed"
done | make_runs
for seed in 0 3; do
  short="$plain --steps 1050 --decay 0.4 --weight-decay 0.4"
  echo "10 circuit runs/shorter/decay0.4_s$seed $main $short --seed $seed"
done | make_runs

# transformers A, B, C: the paper's optimizer in a tenth of its steps (circuits.md, emergence.md)
paper="$main $plain --optimizer adamw"
make_runs << RUNS
23 circuit A $paper --steps 3000 --seed 0
23 circuit B $paper --steps 3000 --seed 1
23 circuit C $paper --steps 3000 --seed 2
RUNS
for seed in 0 1 3; do
  echo "23 circuit runs/adamw/s$seed $paper --steps 3000 --save-every 20 --seed $seed"
done | make_runs

# RoPE (emergence.md)
for seed in {0..5}; do
  rope="$paper --rotary qk --steps 1600 --eval-every 20 --save-every 20"
  echo "16 circuit runs/rope/s$seed $rope --seed $seed"
done | make_runs
for seed in {6..9}; do
  rope="$paper --rotary qk --steps 1600 --eval-every 20 --stop-below 0.15"
  echo "6 loss runs/rope/s$seed $rope --seed $seed"
done | make_runs
make_runs <<< "19 circuit runs/rope/steps3000_s0 $paper --rotary qk --steps 3000"

# the same at twice the rate (paper.md)
twice="$paper --rotary qk --lr 2e-3 --clip 0.3 --steps 1400 --decay 0.8"
for seed in {0..9}; do
  echo "14 circuit runs/rope_twice/s$seed $twice --seed $seed"
done | make_runs

# without the implicit curriculum (curriculum.md), and in float32 (paper.md)
without="--no-ic --steps 8000 --stop-below 0 --eval-every 400"
make_runs << RUNS
53 loss runs/without_curriculum/L12_s0 $paper $without
59 loss runs/without_curriculum/L12_rope_s0 $paper --rotary qk $without
18 loss runs/without_curriculum/L4_s0 $paper --layers 4 --heads 8 $without
19 loss runs/without_curriculum/L4_rope_s0 $paper --layers 4 --heads 8 --rotary qk $without
22 loss runs/float32/s0 $main $plain --dtype float32
22 loss runs/float32/s1 $main $plain --dtype float32 --seed 1
22 loss runs/float32/s2 $main $plain --dtype float32 --seed 2
RUNS

# which part of the implicit curriculum is needed (curriculum.md): subsets of the symbols, and stages
small="$plain --layers 4 --heads 4 --width 64 --lr 4e-3 --steps 2400 --decay 0.3 --stop-below 0.1"
for seed in {0..3}; do
  for targets in "1 2 3" "1" "2" "3" "1 2" "1 3" "2 3"; do
    echo "6 loss runs/curriculum/D3_targets${targets// /-}_s$seed $small --targets $targets --seed $seed"
  done
  from="$small --seed $seed --init $runs/curriculum/D3"
  echo "2 loss runs/curriculum/D3_x1_then_x1-2_s$seed ${from}_targets1_s$seed --targets 1 2"
  echo "2 loss runs/curriculum/D3_x1_then_x1-2_then_all_s$seed ${from}_x1_then_x1-2_s$seed"
  echo "6 loss runs/curriculum/D3_x1_then_x3_s$seed ${from}_targets1_s$seed --no-ic"
  echo "6 loss runs/curriculum/D3_x1-2_then_x3_s$seed ${from}_targets1-2_s$seed --no-ic"
  echo "2 loss runs/curriculum/D3_all_then_x3_s$seed ${from}_targets1-2-3_s$seed --no-ic --steps 600 --stop-below 0"
  echo "3 loss runs/curriculum/D3_x3_then_all_s$seed ${from}_targets3_s$seed"
done | make_runs
for seed in {4..7}; do
  for targets in "1 2 3" "1 3"; do
    more="--targets $targets --dtype float32 --seed $seed"
    echo "6 loss runs/curriculum/D3_targets${targets// /-}_s$seed $small $more"
  done
done | make_runs
for D in 2 5; do
  echo "4 loss runs/curriculum/D${D}_all_s0 $small --D $D"
  echo "4 loss runs/curriculum/D${D}_all_s1 $small --D $D --seed 1"
  echo "9 loss runs/curriculum/D${D}_last_s0 $small --D $D --no-ic"
done | make_runs
make_runs << RUNS
9 loss runs/curriculum/D5_targets1-2-4-5_s0 $small --D 5 --targets 1 2 4 5
9 loss runs/curriculum/D5_targets2-3-4-5_s0 $small --D 5 --targets 2 3 4 5
RUNS

# conditional retrieval (curriculum.md): two schedules, fewer layers, frozen attention, other target symbols
both="$plain --task conditional --width 64 --lr 4e-3"
four="$both --layers 4 --heads 4"
long="--steps 4000 --decay 0.3"
for seed in {0..4}; do
  echo "15 circuit runs/conditional/all_s$seed $four --steps 2500 --decay 0.4 --save-every 25 --seed $seed"
done | make_runs
for seed in 2 4 5 6; do
  echo "20 circuit runs/conditional/long_s$seed $four $long --save-every 40 --seed $seed"
done | make_runs
make_runs << RUNS
10 loss runs/conditional/qk_s4 $four --rotary qk --steps 2500 --decay 0.4 --save-every 25 --seed 4
8 loss runs/conditional/z_s0 $four --steps 2000 --decay 0.4 --stop-below 0.1 --no-ic
8 loss runs/conditional/x-z_s0 $four --steps 2000 --decay 0.4 --stop-below 0.1 --targets 1 3
20 loss runs/conditional/x-z_s2 $four $long --stop-below 0.1 --targets 1 3 --seed 2
20 loss runs/conditional/y-z_s0 $four $long --stop-below 0.1 --targets 2 3
20 loss runs/conditional/y-z_s2 $four $long --stop-below 0.1 --targets 2 3 --seed 2
12 loss runs/conditional/all_L2_s0 $both $long --layers 2 --heads 4
16 loss runs/conditional/all_L3_s0 $both $long --layers 3 --heads 4
RUNS
for layers in 1 2 3; do
  run="$runs/conditional/held_L${layers}_s0"
  # shellcheck disable=SC2086
  [ -e "$run/model.pt" ] || python -m extras.studies.frozen minimal $both --heads 2 --layers "$layers" --steps 400 --stop-below 0 --out "$run"
done

for seed in 5 6; do
  echo "20 circuit runs/again/conditional_s$seed $four $long --seed $seed"
done | make_runs
make_runs <<< "15 circuit runs/again/conditional_all_s0 $four --steps 2500 --decay 0.4"

# the main command at half the width, with weight decay from 0.1 to 5 e-folds (emergence.md)
narrow="$plain --layers 12 --heads 1 --width 64 --lr 2e-3 --stop-below 0"
for seed in 0 1 2; do
  for folds_decay in "0.1 0.043" "0.3 0.13" "1 0.434" "2.4 1.043" "5 2.172"; do
    read -r folds decay <<< "$folds_decay"
    echo "6 circuit runs/cleaning/muon_e${folds}_s$seed $narrow --steps 1600 --weight-decay $decay --seed $seed"
    more="--steps 1600 --weight-decay $decay --optimizer adamw --rotary qk --seed $seed"
    echo "6 circuit runs/cleaning/adamw_rope_e${folds}_s$seed $narrow $more"
  done
done | make_runs
for seed in {3..6}; do
  more="--steps 1600 --weight-decay 0.043 --optimizer adamw --rotary qk --seed $seed"
  echo "6 circuit runs/cleaning/adamw_rope_e0.1_s$seed $narrow $more"
done | make_runs
for seed in {3..9}; do
  more="--weight-decay 0.13 --save-every 20 --seed $seed"
  echo "6 circuit runs/cleaning/muon_e0.3_s$seed $narrow --steps 1600 $more"
done | make_runs
make_runs <<< "12 loss runs/cleaning/time_s0 $narrow --steps 3000 --decay 0.1 --weight-decay 0.2 --save-every 100"

# many depths (depth.md): 115 and 30 core-minutes
python sweep.py --preset laptop --out "$folder/sweep"
unmasked="$plain --heads 8 --lr 2e-3 --decay 0.3 --stop-below 0 --D 5 --steps 2000 --no-causal --rotary qk"
# shellcheck disable=SC2086
python sweep.py --layers 2 3 4 --seeds 2 $unmasked --out "$folder/sweep"

# the diagram of heads (depth.md): about 5 minutes a run of one layer, 12 of two
diagram() {  # SEEDS LAYERS N D STEPS HEADS FLAGS
  kind=$(tr -d ' ' <<< "${7/--/_}")
  [ "$5" -gt 4000 ] && kind="${kind}_steps$5"
  for seed in $(seq 1 "$1"); do
    for heads in $6; do
      echo "5 loss depth_width/L$2_H${heads}_N$3_D$4${kind}_s$seed --layers $2 --heads $heads --head-size 32 --N $3 --D $4 --steps $5 --stop-below ${stop:-0.002} --eval-every 100 --seed $seed $7"
    done
  done | make_runs
}
every="1 2 3 4 5 8 16"
diagram 5 1 2 1 3000 "$every" ""
diagram 5 1 4 1 4000 "$every" ""
diagram 5 1 8 1 4000 "$every 9" ""
diagram 5 1 16 1 2000 4 ""
diagram 5 1 4 2 4000 16 ""
diagram 5 2 4 2 2000 1 ""
diagram 5 2 4 2 2500 "2 3 4 5 8 16" ""
diagram 5 3 4 4 2500 4 ""
diagram 1 2 4 3 2500 16 ""
diagram 1 2 4 4 2500 16 ""
diagram 1 3 4 4 2500 16 ""
diagram 5 1 4 1 4000 8 --no-mlp
diagram 5 2 4 2 2500 8 --no-mlp
diagram 5 1 4 1 4000 "$every" "--rotary qk"
diagram 5 2 4 2 2500 4 "--task shuffled"
diagram 5 3 4 2 2500 4 "--task shuffled"
diagram 5 3 4 4 2500 4 "--task shuffled"
diagram 10 2 4 2 10000 1 ""
diagram 6 2 4 2 10000 8 --no-mlp
diagram 5 2 16 2 10000 4 ""
diagram 9 2 4 2 10000 4 "--task shuffled"
# the runs below that have no row had not ended
# seeds 6 and 7: what fixing weights by place costs, and swaps in two layers
diagram 7 1 4 1 4000 "2 3 4 5 8" ""
diagram 6 1 2 1 3000 1 ""
diagram 7 2 4 2 2500 16 ""
# places that say nothing, with 4, 6, 8 and 20 distractors
for task in random20 fixed20; do
  diagram 5 1 2 1 4000 8 "--task $task"
  stop=0.01 diagram 5 2 2 1 4000 8 "--task $task"  # the first seed to 0.002
done
for task in random4 random6 random8; do
  diagram 3 1 2 1 4000 8 "--task $task"
done
diagram 3 1 2 1 4000 16 "--task random8"
diagram 5 1 2 1 4000 16 "--task random20"
diagram 5 1 4 1 4000 "8 16" "--task random20"
stop=0.01 diagram 5 2 2 1 4000 16 "--task random20"  # the first seed to 0.002
stop=0.01 diagram 5 2 4 1 4000 "8 16" "--task random20"
# larger k
diagram 5 2 2 3 3000 "8 16" ""
diagram 5 1 2 2 3000 16 ""
diagram 5 1 2 2 10000 16 ""
diagram 5 2 3 3 4000 8 ""
diagram 5 3 2 5 5000 8 ""
diagram 5 3 2 7 5000 8 ""
diagram 5 2 4 3 6000 16 ""
diagram 5 2 4 3 12000 16 ""  # 20 minutes each
diagram 5 3 4 4 12000 16 ""  # 45 minutes each
diagram 3 3 4 4 4500 4 ""
# other numbers of chains and head sizes
diagram 1 1 3 1 4000 "3 4 6" ""
diagram 1 1 6 1 4000 "6 7 12" ""
diagram 1 1 2 1 3000 "1 2" "--head-size 64"
diagram 1 1 2 1 3000 2 "--head-size 8"
diagram 1 1 2 1 3000 "2 4" "--head-size 4"
diagram 1 1 4 1 4000 "2 4" "--head-size 64"
diagram 1 1 4 1 4000 "4 8" "--head-size 8"
diagram 1 1 4 1 4000 "4 8 16" "--head-size 4"
diagram 1 1 8 1 4000 "4 8" "--head-size 64"
diagram 1 1 8 1 4000 16 "--head-size 8"
diagram 1 1 8 1 4000 "16 32" "--head-size 4"
# one head of each layer held on the minimal circuit, then freed
for seed in {1..8}; do
  for shape in "2 1 2" "2 8 2" "3 4 4"; do
    read -r layers heads D <<< "$shape"
    name="L${layers}_H${heads}_N4_D${D}"
    held="$folder/depth_width/${name}_frozen_s$seed"
    shape="--layers $layers --heads $heads --head-size 32 --N 4 --D $D --eval-every 100 --seed $seed"
    # shellcheck disable=SC2086
    [ -e "$held/model.pt" ] || python -m extras.studies.frozen minimal $shape --steps 800 --stop-below 0 --out "$held"
    make_runs <<< "5 loss depth_width/${name}_unfrozen_s$seed $shape --steps 2500 --stop-below 0.002 --init $held"
  done
done

# the circuits of some of these (circuits.md)
for name in L1_H{5,8}_N4_D1_s1 L1_H16_N8_D1_s{2..5} L3_H4_N4_D2_taskshuffled_s{1..5}; do
  [ "${name:1:1}" = 1 ] && group=one_layer || group=shuffled
  mkdir -p "$runs/$group"
  cp -r "$folder/depth_width/$name" "$runs/$group"
  [ -e "$runs/$group/$name/circuit.json" ] || python -m extras.studies.stage ablate "$runs/$group/$name"
done

# two and three layers with more steps (depth.md): 70 and 125 core-minutes
longer="$plain --heads 8 --D 5 --lr 2e-3 --decay 0.3 --stop-below 0 --steps 5000"
# shellcheck disable=SC2086
python sweep.py --layers 2 --seeds 10 $longer --out "$folder/longer"
# shellcheck disable=SC2086
python sweep.py --layers 3 --seeds 10 $longer --out "$folder/longer"

# the circuits of the three runs of the sweep that reach the limit of the law
for layers in 2 3 4; do
  flags="$plain --layers $layers --heads 8 --D 5 --steps 1500 --stop-below 0 --lr 2e-3 --decay 0.3 --seed 1"
  echo "5 circuit runs/depth/L${layers}_s1 $flags"
done | make_runs

# models of too few layers, and three metrics (paper.md)
short="$plain --heads 8 --steps 1500 --stop-below 0 --lr 2e-3 --decay 0.3"
for seed in 0 1 2; do
  echo "1 loss metrics/L1_D3_s$seed $short --layers 1 --D 3 --seed $seed"
  echo "1 loss metrics/L1_D5_s$seed $short --layers 1 --D 5 --seed $seed"
  echo "4 loss metrics/L2_D5_s$seed $short --layers 2 --D 5 --seed $seed"
done | make_runs

make_runs <<< "5 loss metrics/L1_H16_D2_s1 --layers 1 --heads 16 --head-size 32 --D 2 --steps 4000 --stop-below 0.002 --eval-every 100 --seed 1"

# Figures 3 and 8, and the related systems (extras/mechanisms/README.md)
python -m extras.studies.theory --figure "$folder/figures/flow.png"
for name in memories recall bigrams noise hops; do
  [ -e "$folder/mechanisms/$name.json" ] || python -m extras.mechanisms "$name" --out "$folder/mechanisms"
done

# rows of all runs, then the figures of studies
make_rows() {
  for group in "$runs"/*/; do
    python -m extras.studies.rows "$(basename "$group")" "$group"* --out "$runs"
  done
}
make_rows
figures="$folder/figures"
python -m extras.studies.order "$runs"/default/s? "$folder"/reads/* --out "$figures"
python -m extras.studies.metrics "$folder"/metrics/* "$folder"/depth_width/L1_H16_N2_D2_s? "$folder"/A "$runs"/default/s0 --out "$figures"
python -m extras.studies.curriculum "$runs/curriculum.jsonl" --out "$figures"
python -m extras.studies.circuits "$folder"/[ABC] "$runs"/default/s0 --out "$figures"

[ "${2:-}" = --all ] || exit 0

# transformer D and the paper's literal settings (paper.md), then Figure 4 with eight seeds and the paper's own sweep
of_D="$plain --layers 24 --heads 1 --head-size 16 --width 512 --no-mlp --D 4 --batch 256 --steps 6400 --stop-below 0"
of_D="$of_D --optimizer adamw --save-every 20 --eval-every 40"
literal="$paper --steps 24000 --stop-below 0 --decay 0 --eval-every 100 --save-every 400"
make_runs << RUNS
83 circuit D $of_D
54 circuit runs/rope/D_s0 $of_D --rotary qk --steps 3000
83 loss runs/literal/D_s0 $of_D --decay 0 --beta2 0.999 --clip 0 --warmup 0
115 loss runs/literal/no_aid_s0 $literal --beta2 0.999 --clip 0 --warmup 0
115 loss runs/literal/no_aid_s1 $literal --beta2 0.999 --clip 0 --warmup 0 --seed 1
115 loss runs/literal/no_aid_s2 $literal --beta2 0.999 --clip 0 --warmup 0 --seed 2
RUNS
python sweep.py --preset night --out "$folder/sweep"
python sweep.py --preset paper --out "$folder/paper"
make_rows
python -m extras.studies.circuits "$folder/D" --out "$figures"

# two small language models; the packages, and how to serve them for answers.jsonl, are in extras/llm/README.md
for model in SmolLM2-135M-Instruct gemma-3-270m; do
  python -m extras.llm.weights choices --model "$model" --out "$folder/llm"
  python -m extras.llm.weights late --model "$model" --out "$folder/llm"
done
python -m extras.llm --plot "$folder"/llm/*.jsonl.gz --out "$folder/llm"
