#!/usr/bin/env bash
# Everything that needs a GPU, in stages of under 8 minutes. A stage that succeeded is not run again: start it again
# after an interruption. Results are one JSON file a stage in OUT, tracebacks in one .log beside it. Nothing is fetched.
#
#   bench/gpu.sh [--dry] [--out OUT] [--seconds S] [STAGE...] [--anyway]
#
# Stages: links calibration tests parity updates trace watching iterations-1b iterations-3b iterations-7b sweeps tiers;
# all of them by default. --dry runs each at toy size on the emulated device, which proves that the script runs and
# measures nothing. Missing requirements are listed before anything runs; --anyway starts without them. --seconds: time
# limit for the rows of a stage (default 430); rows left out are measured when the stage is run again.
# PYTHON chooses the interpreter, which stays as it is: what has to be installed goes into OUT/venv, from the wheels in
# the folder WHEELS, which `python3 -m bench.gpu.wheelhouse wheels` makes on a machine with a network.
set -euo pipefail
HERE=$PWD
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=runs/gpu
DRY=()
ANYWAY=false
SECONDS_OF_STAGE=430
STAGES=()
while (($#)); do
  case $1 in
    --dry) DRY=(--dry) ;;
    --anyway) ANYWAY=true ;;
    --out) OUT=$2; shift ;;
    --seconds) SECONDS_OF_STAGE=$2; shift ;;
    links | calibration | tests | parity | updates | trace | watching | iterations-[137]b | sweeps | tiers)
      STAGES+=("$1") ;;
    *) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
((${#STAGES[@]})) || STAGES=(
  links calibration tests parity updates trace watching iterations-1b iterations-3b iterations-7b sweeps tiers
)
mkdir -p "$OUT"
OUT=$(realpath "$OUT")

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "bench/gpu.sh: $PYTHON is $("$PYTHON" --version 2>&1), and 3.11 or newer is needed: set PYTHON" >&2
  exit 2
}
preflight() { "$PYTHON" -m bench.gpu.preflight "${DRY[@]}" "$@" || $ANYWAY; }

WHEELS=${WHEELS:+$(cd "$HERE" && realpath "$WHEELS")}
own=$OUT/venv/bin
[[ -x $own/python ]] && PYTHON=$own/python
export PATH=$own:$PATH # for cmake and ninja, which DeepSpeed asks for, too
preflight ${WHEELS:+--wheels "$WHEELS"} || exit 2
built() { "$PYTHON" -c 'import tidegate.kernels' 2>/dev/null; }
if [[ -n $WHEELS ]] || ! built; then
  if [[ $PYTHON != "$own/python" ]]; then
    "$PYTHON" -m bench.gpu.environment "$OUT/venv"
    PYTHON=$own/python
  fi
  [[ -z $WHEELS ]] || "$PYTHON" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
  built || timeout 480 "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps -e . >"$OUT/build.log" 2>&1 || {
    tail -n 5 "$OUT/build.log" >&2
    echo "bench/gpu.sh: Tidegate's extension was not built in 480 s or failed: what pip said is in $OUT/build.log" >&2
    exit 1
  }
  preflight || exit 2
fi

status=0
for stage in "${STAGES[@]}"; do
  result=$OUT/$stage.json
  log=$OUT/$stage.log
  if [[ -s $result ]]; then
    echo "== $stage: done already ($result)"
    continue
  fi
  echo "== $stage"
  # The result appears whole or not at all.
  code=0
  timeout $((SECONDS_OF_STAGE + 50)) "$PYTHON" -m bench.gpu."${stage%-*b}" "${DRY[@]}" --stage "$stage" \
    --results "$OUT" --seconds "$SECONDS_OF_STAGE" \
    >"$result.part" 2>"$log" || code=$?
  if ((code == 0)); then
    mv "$result.part" "$result"
    rm -f "$OUT/$stage.rows"
    continue
  fi
  status=1
  tail -n 3 "$log" >&2
  if ((code == 3)); then
    echo "== $stage is not done: run it again for the rows that lacked time; the others are kept" >&2
  elif ((code == 124)); then
    echo "== $stage took more than $((SECONDS_OF_STAGE + 50)) s: what it said is in $log" >&2
  else
    echo "== $stage failed: what it said is in $log" >&2
  fi
done
exit $status
