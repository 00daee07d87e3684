#!/usr/bin/env bash
# Trains the runs that stand on a page, a folder of them for each file of results/runs, and finds circuits. The same command continues
# after a stop. Here all but four is float32, and many rows are bfloat16; some were evaluated or saved more often: their config says so. Not
# here: the runs of curriculum.jsonl that start from others' weights ("then" in their names; commit 4dff4b6, with their --init), repeats on
# another machine ("again"), runs led from fewer chains ("led" and "N" in their names), and single further runs.
#   bash results/reproduce.sh out/again          # about 80 core-hours, days on a laptop
#   bash results/reproduce.sh out/again --all    # transformer D and the literal settings too, days without a GPU
# shellcheck disable=SC2086,SC2046  # flags are words
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?name a folder for the runs, say out/again}
sweep() { python sweep.py --out "$out/$1" --qk-std 0.1 "${@:2}"; }  # GROUP FLAGS; of a flag given twice the last counts
circuits() {  # of the runs that have ended
  for run in "$@"; do
    [ ! -e "$run/model.pt" ] || [ -e "$run/analyzed" ] || { python ablate.py "$run"; python analyze.py "$run"; touch "$run/analyzed"; }
  done
}
# the main command, and with larger first weights, as most runs here; the optimizer of A, B and C
sweep main --qk-std 0.05 --save-every 50 --seed 0 1 103 107 108 $(seq 110 119)
sweep larger --seed $(seq 0 9) --save-every 10
sweep larger --seed $(seq 10 19) $(seq 30 39) $(seq 100 109)
plain="--ema 0 --qk-std 0.02"; adamw="$plain --optimizer adamw"
sweep adamw $adamw --steps 3000 --seed 0 1 2 3 --save-every 20
sweep adamw $adamw --steps 3000 --seed 1 2 --dtype bfloat16
aids="$adamw --stop-below 0 --eval-every 100 --save-every 500 --clip 1 --resume"
python train.py $aids --steps 10000 --decay 0.2 --seed 0 --out "$out/adamw/clip1_s0"
for seed in 1 2; do python train.py $aids --steps 12000 --seed $seed --out "$out/adamw/clip1_s$seed"; done
python train.py $aids --steps 24000 --seed 0 --out "$out/adamw/clip1_24000_s0"
circuits "$out"/{main,larger,adamw}/*/
# other first weights, averages, decay and lengths
sweep others --qk-std 0.02 --seed $(seq 0 8)
sweep others $plain --seed $(seq 0 10) --save-every 20
sweep others $plain --weight-decay 1 --seed $(seq 0 4) --save-every 25
sweep others $plain --steps 1050 --decay 0.4 --weight-decay 0.1 0.4 --seed 0 3 7 8 9
rope="$adamw --positions rope"  # RoPE
sweep rope $rope --steps 1600 --eval-every 20 --seed $(seq 0 15) --save-every 20
sweep rope $rope --steps 3000
sweep others $rope --lr 2e-3 --clip 0.3 --steps 1400 --decay 0.8 --seed $(seq 0 9)
sweep rope_muon --positions rope --seed $(seq 0 9) $(seq 40 49) --save-every 25
for way in "--decay 0.5 0.7" "--ema 0.95 0.99" "--clip 0 1"; do sweep tail --positions rope $way --seed 10 11 12; done
sweep tail --positions rope --steps 800 --seed 10 11 12 $(seq 40 49)
circuits "$out"/{rope,rope_muon}/*/
# the main command at half the width, by weight decay
narrow="$plain --width 64 --lr 2e-3 --stop-below 0"
sweep cleaning $narrow --steps 1600 --weight-decay 0.043 0.13 0.434 1.043 2.172 --seed 0 1 2
sweep cleaning $narrow --steps 1600 --weight-decay 0.13 --seed $(seq 3 9) --save-every 10
sweep cleaning $narrow --steps 1600 --weight-decay 0.043 0.13 0.434 1.043 --seed 0 1 2 --optimizer adamw --positions rope
# what must be asked for (curriculum.md): the last symbol alone, subsets, conditional retrieval
last="--targets last --steps 8000 --stop-below 0 --eval-every 400 --positions appended rope"
for shape in "12 --heads 1" "4 --heads 8"; do sweep others $adamw $last --layers $shape; done
subsets="$plain --layers 4 --heads 4 --width 64 --lr 4e-3 --steps 2400 --decay 0.3 --stop-below 0.1"
sweep curriculum $subsets --targets all last 1 2 1,2 2,3 1,3 --seed 0 1 2 3
sweep curriculum $subsets --targets all 1,3 --seed 4 5 6 7
sweep curriculum $subsets --D 2 5 --targets all last --seed 0 1
sweep curriculum $subsets --D 5 --targets 1,2,4,5 2,3,4,5
both="$plain --layers 4 --width 64 --lr 4e-3 --heads 4 --task extras.studies.tables:Conditional"
sweep conditional $both --steps 2500 --decay 0.4 --seed $(seq 0 4) --save-every 25
sweep conditional $both --steps 4000 --decay 0.3 --seed 2 4 5 6 --save-every 40
sweep conditional $both --steps 2000 --decay 0.4 --stop-below 0.1 --targets last 1,3
sweep conditional $both --steps 4000 --decay 0.3 --stop-below 0.1 --targets 1,3 2,3 --seed 0 2
sweep conditional $both --steps 4000 --decay 0.3 --layers 2 3
# how many layers (depth.md): long chains, with and without a mask, Figure 4
sweep ahead --D 7 --steps 3000 --seed $(seq 0 4)
sweep ahead --layers 3 4 --heads 4 --D 7 --steps 8000 --eval-every 200 --seed $(seq 0 4)
long="--qk-std 0.1 --layers 3 --heads 8 --D 5 --stop-below 0.002 --eval-every 100 --seed 1 --resume"
python train.py $long --steps 10000 --out "$out/ahead/long_L3_H8_size16_s1"
long="$long --head-size 32 --dtype bfloat16"
python train.py $long --steps 12000 --out "$out/ahead/long_L3_H8_s1"
python train.py $long --steps 4000 --init "$out/ahead/long_L3_H8_s1" --out "$out/ahead/long_L3_H8_s1_then"
sweep ahead --layers 4 5 --heads 4 --D 8 --steps 8000 --eval-every 200 --seed $(seq 0 4)
for shape in "2 --D 2" "3 --D 4" "2 --D 2 --no-causal" "3 --D 4 --no-causal"; do
  sweep mask --layers $shape --heads 2 4 --steps 6000 --eval-every 200 --seed $(seq 0 4)
done
circuits "$out"/{ahead,conditional}/*/
sweep others $plain --heads 8 --D 5 --lr 2e-3 --decay 0.3 --stop-below 0 --steps 1500 --layers 2 3 4 --seed 1
figure4="$adamw --heads 8 --steps 10000 --stop-below 0 --eval-every 100"
sweep sweep $figure4 --D 5 --layers 1 2 3 4 5 6
sweep sweep $figure4 --targets last --layers 2 4 8
batch512="$figure4 --batch 512 --examples 1048576"
sweep sweep $batch512 --D 5 --layers 1 2
sweep sweep $batch512 --D 5 --layers 3 4 --steps 7000
sweep sweep $batch512 --targets last --layers 3 --steps 4500
for L in 4 5 6; do [ -e "$out/adamw/batch128_L$L" ] || cp -r "$out"/sweep/L${L}_H8_D5_optimizeradamw_* "$out/adamw/batch128_L$L"; done
for L in 1 2 3 4; do [ -e "$out/adamw/batch512_L$L" ] || cp -r "$out"/sweep/L${L}_H8_D5_*batch512* "$out/adamw/batch512_L$L"; done
python train.py $batch512 --D 5 --layers 3 --steps 700 --decay 0 --examples 262144 --resume --out "$out/adamw/batch512_fewer_examples"
sweep sweep --heads 8 --steps 2500 --D 5 --layers 1 2 3 4 5 6 7 8 --seed $(seq 0 4)
sweep sweep --heads 8 --steps 2500 --targets last --layers 1 3 5 8 --seed 0 1 2
sweep laptop --heads 8 --steps 3000 --layers 1 2 3 4 --seed 0 1
sweep laptop --heads 8 --steps 3000 --layers 2 4 --targets last --seed 0 1
# beyond the law, then heads against layers (depth.md)
few="--head-size 32 --stop-below 0.002 --eval-every 100"
places=extras.studies.places
sweep addresses $few --heads 8 --layers 2 --N 2 --D 3 --steps 3000 --seed $(seq 11 15) 21 22 23
for shape in "3 --N 2 --D 3" "2 --D 2"; do sweep addresses $few --heads 8 --layers $shape --steps 3000 --seed 21; done
sweep addresses $few --heads 8 --layers 3 --N 2 --D 4 --steps 5000 --seed $(seq 11 15)
sweep addresses $few --heads 8 --layers 2 --D 2 --steps 10000 --seed $(seq 11 15)
sweep addresses $few --heads 8 --layers 2 --D 2 --no-mlp --steps 4000 --seed 11 12 13
sweep addresses $few --heads 8 --layers 2 3 --N 2 --D 2 --steps 4000 --seed 1 2 3 --task chain $places:random{9,21}
for shape in "1 2 1 3000 1 2 3 4 5 8 16" "1 4 1 4000 1 2 3 4 5 8 16" "1 8 1 4000 1 2 3 4 5 8 9 16" "1 16 1 2000 4" "1 2 2 3000 16" \
  "1 2 2 10000 16" "1 4 2 4000 16" "2 4 1 4000 4" "2 4 2 2000 1" "2 4 2 2500 2 3 4 5 8 16" "2 4 2 10000 1 8" "2 16 2 10000 4" \
  "2 2 3 3000 8 16" "2 3 3 4000 8" "2 4 3 6000 16" "2 4 3 12000 8 16" "3 4 2 2500 8" "3 4 3 12000 8" "3 4 4 2500 4" "3 4 4 4500 4" \
  "3 4 4 12000 4 16" "3 2 5 5000 8" "3 2 7 5000 8" "1 4 1 4000 8 --no-mlp" "2 4 2 2500 8 --no-mlp" "2 4 2 10000 8 --no-mlp" \
  "1 4 1 4000 1 2 3 4 5 8 16 --positions rope" "1 2 1 4000 8 --task $places:random"{4,6,8} \
  "1 2 1 4000 8 16 --task $places:random20" "1 4 1 4000 8 16 --task $places:random20" "2 2 1 10000 4 --task $places:random12" \
  "2 2 1 4000 8 16 --task $places:random20" "2 4 1 4000 8 16 --task $places:random20" "1 4 1 10000 16 --task $places:random"{4,8}; do
  read -r layers N D steps heads <<< "$shape"
  sweep depth_width $few --layers $layers --N $N --D $D --steps $steps --seed $(seq 1 5) --heads $heads
done
circuits "$out"/depth_width/L1_H{5,8,16}_D1_*_s1/ "$out"/addresses/*_s2?/
# one layer with 9 to 23 places, from scratch, and led by the weights of the run with fewer places
one="--qk-std 0.1 --layers 1 --head-size 32 --N 2 --D 1 --eval-every 100 --save-every 0 --resume"
for heads in 8 16 32; do for seed in 1 2 3; do
  before=scratch9
  for number in 9 11 15 23; do
    flags="$one --heads $heads --seed $seed --task $places:random$((number - 3))"
    of="H${heads}_s$seed"
    python train.py $flags --steps 10000 --out "$out/depth_width/scratch${number}_$of"
    [ $number = 9 ] && continue
    python train.py $flags --steps 5000 --out "$out/depth_width/led${number}_$of" --init "$out/depth_width/${before}_$of"
    before=led$number
  done
done; done
python sweep.py --out "$out/depth_width"
# transformer D, with RoPE too, and the literal settings (paper.md)
if [ "${2:-}" = --all ]; then
  D="--layers 24 --head-size 16 --width 512 --no-mlp --D 4 --batch 256 --stop-below 0 --eval-every 40 --save-every 20"
  literal="--stop-below 0 --decay 0 --beta2 0.999 --clip 0 --warmup 0"
  sweep D $adamw $D --steps 6400
  python train.py $adamw $D --steps 6400 --examples 2048 --save-every 0 --resume --out "$out/adamw/D_2048"
  sweep rope $rope $D --steps 3000
  sweep others $adamw $D --steps 6400 $literal
  sweep others $adamw --steps 24000 --eval-every 100 $literal --seed 0 1 2
  python train.py $adamw $literal --steps 9000 --eval-every 100 --save-every 0 --seed 1 --resume --out "$out/others/literal_no_aid_float32_s1"
  circuits "$out"/D/*_s0
fi
# rows of these runs; the figures of the studies and of related systems
for group in main larger adamw others rope rope_muon tail cleaning curriculum conditional ahead mask laptop addresses; do
  python -m extras.studies.rows $group "$out/$group"/*/ --out "$out/runs"
done
python -m extras.studies.theory --figure "$out/figures/flow.png"
for name in memories recall bigrams attention joint noise hops; do python -m extras.mechanisms $name --out "$out/mechanisms"; done
