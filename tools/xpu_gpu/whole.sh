#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# whole.sh FOLDER RESULTS: a whole run on the machine with the GPU, in the order of worth, since such machines are lent for
# minutes: the kernels are compiled, the tests, compute-sanitizer over the conformance tests, the benchmarks in turns. FOLDER is of run.sh, RESULTS
# gets the logs. STEPS (of "kernels tests memcheck racecheck synccheck bench") chooses, TESTS names files or tests, WORKERS is the
# number of processes, TESTS_SECONDS and CHECK_SECONDS are the most that a step may take.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) folder=$1 results=$(mkdir -p "$2" && cd "$2" && pwd)
workers=${WORKERS:-12}
conformance=${CONFORMANCE:-tests/test_llm_kernels.py tests/test_kernels.py tests/test_compute_kernels.py tests/test_index_kernels.py}
told() { echo "== $(date +%T) $1"; }
run() { "$here/run.sh" "$folder" "$@"; }
told "build"
run true || exit 1
for step in ${STEPS:-kernels tests memcheck bench racecheck synccheck}; do
  told "$step"
  case $step in
    kernels) run python3 "$here/compile.py" "$workers" > "$results/kernels.log" 2>&1; tail -n 3 "$results/kernels.log" ;;
    tests)
      run timeout -s INT "${TESTS_SECONDS:-280}" python3 -m pytest -q -p no:cacheprovider -n "$workers" --timeout 120 \
        --junitxml "$results/tests.xml" -rfE --tb=short ${TESTS:-tests} > "$results/tests.log" 2>&1
      tail -1 "$results/tests.log" ;;
    memcheck | racecheck | synccheck)
      # A tool sees the kernels of all worker processes; each finding is told in the log of the process.
      run timeout -s INT "${CHECK_SECONDS:-100}" compute-sanitizer --tool "$step" --target-processes all \
        --log-file "$results/$step.%p.txt" python3 -m pytest -q -p no:cacheprovider -n "$workers" --timeout 90 \
        $conformance > "$results/$step.log" 2>&1
      tail -1 "$results/$step.log"
      cat "$results/$step".*.txt > "$results/$step.txt"; rm -f "$results/$step".*.txt
      grep -h -E "ERROR SUMMARY|RACECHECK SUMMARY" "$results/$step.txt" | sort | uniq -c ;;
    bench)
      for turn in ${TURNS:-1 2}; do
        run python3 benchmarks/gpu.py xpu --json "$results/xpu$turn.json" > /dev/null 2> "$results/bench.log"
        # torch's own device: without what run.sh sets.
        python3 "$folder/source/packages/ipex-xpu-kernels/benchmarks/gpu.py" cuda --json "$results/cuda$turn.json" > /dev/null
      done
      python3 "$folder/source/packages/ipex-xpu-kernels/benchmarks/gpu.py" compare "$results"/{xpu,cuda}[0-9]*.json \
        | tee "$results/bench.md" ;;
  esac
done
told "end"
