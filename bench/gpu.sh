#!/usr/bin/env bash
# Everything that needs a GPU, in stages of under 8 minutes. A stage that succeeded is not run again: start it again
# after an interruption. Results are one JSON file a stage in OUT. Nothing is fetched from anywhere.
#
#   bench/gpu.sh [--dry] [--out OUT] [STAGE...]
#
# Stages: links tests parity updates trace watching iterations-1b iterations-3b iterations-7b sweeps tiers;
# all of them by default. --dry runs each at toy size on the emulated device, which proves that the script runs and
# measures nothing. PYTHON chooses the interpreter; wheels in WHEELS (a folder: DeepSpeed, torchao) are installed first.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=runs/gpu
DRY=()
STAGES=()
while (($#)); do
  case $1 in
    --dry) DRY=(--dry) ;;
    --out) OUT=$2; shift ;;
    links | tests | parity | updates | trace | watching | iterations-[137]b | sweeps | tiers)
      STAGES+=("$1") ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
((${#STAGES[@]})) || STAGES=(
  links tests parity updates trace watching iterations-1b iterations-3b iterations-7b sweeps tiers
)
mkdir -p "$OUT"

if [[ -n ${WHEELS:-} ]]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" "$WHEELS"/*.whl
fi
"$PYTHON" -c 'import tidegate.kernels' 2>/dev/null ||
  timeout 480 "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps -e .

status=0
for stage in "${STAGES[@]}"; do
  result=$OUT/$stage.json
  if [[ -s $result ]]; then
    echo "== $stage: done already ($result)"
    continue
  fi
  echo "== $stage"
  # The result appears whole or not at all.
  if timeout 480 "$PYTHON" -m bench.gpu."${stage%-*b}" "${DRY[@]}" --shape "${stage#*-}" --results "$OUT" >"$result.part"; then
    mv "$result.part" "$result"
  else
    echo "== $stage failed: its output is in $result.part" >&2
    status=1
  fi
done
exit $status
