#!/usr/bin/env bash
# One node's part of a job: node.sh RECIPE [flags]. The sbatch files in this folder start it with srun, once per node.
#
# When SLURM announces the end of the job (TERM, some minutes ahead and on preemption), this script sends TERM to the
# training processes, which save and exit. torchrun runs in a separate session, where it does not receive the notice: it
# would kill its workers 30 seconds later. After a notice the exit code is 143, so that the job is requeued.
#
# Environment variables: MAIN_NODE, MAIN_PORT, NODES, NODE_RANK (default SLURM_NODEID), GPUS (per node), ENGINE (a file
# in accelerate_configs), NOTICE_EVERY (seconds between two signals, default 10).
set -uo pipefail

recipe=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
rank=${NODE_RANK:-$SLURM_NODEID}

setsid accelerate launch --config_file "$root/accelerate_configs/$ENGINE.yaml" \
	--num_machines "$NODES" --num_processes "$((NODES * GPUS))" --machine_rank "$rank" \
	--main_process_ip "$MAIN_NODE" --main_process_port "$MAIN_PORT" "$root/recipes/$recipe.py" "$@" &
launcher=$!

# Repeats the signal for processes that were not started yet, and ignores notices sent to the process group.
pass_on() {
	trap '' TERM
	while kill -0 "$launcher" 2>/dev/null; do
		pkill -TERM --parent "$launcher" || true
		sleep "${NOTICE_EVERY:-10}"
	done
}

noticed=0
notice() {
	if ((!noticed)); then
		noticed=1
		pass_on >/dev/null 2>&1 &
	fi
}
trap notice TERM

status=0
wait "$launcher" || status=$?
# A notice interrupts the wait.
while kill -0 "$launcher" 2>/dev/null; do
	status=0
	wait "$launcher" || status=$?
done
if ((noticed && status)); then
	exit 143
fi
exit "$status"
