#!/usr/bin/env bash
# What only a Mac can show: kernels against stock one-row kernels on the device, the demo model's certificate, and times.
# Its output, pasted into an issue, is enough to act on. Changes nothing but .venv and the cache of certificates.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$(uname -s)" != Darwin ]; then
  echo "check_metal: needs a Mac with Apple silicon, this is $(uname -s)" >&2
  exit 2
fi
make .venv/.test-ready >/dev/null || exit 2
python=.venv/bin/python
failed=0

section() { printf '\n== %s\n' "$1"; }

section "machine"
sw_vers
sysctl -n machdep.cpu.brand_string
git rev-parse HEAD
$python -c 'import mlx.core as mx; print(mx.device_info())'
$python -m pip list 2>/dev/null | grep -Ei '^(mlx|mlx-lm|mlx-metal|mlx_spec) '

section "tests with the metal mark"
$python -m pytest -m metal --plan deep -q -rA || failed=1

section "certificate of the demo model"
MLX_SPEC_CERTIFICATES=off $python -m mlx_spec.certify || failed=1

section "times: stock one row, stock block, ours"
$python scripts/metal_times.py || failed=1

section "end"
[ "$failed" = 0 ] && echo "all passed" || echo "something failed, see above"
exit "$failed"
