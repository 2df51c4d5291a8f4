#!/usr/bin/env bash
# One node's part of a job: node.sh RECIPE [flags]. The sbatch files beside it start it by srun, once on each node.
#
# A notice that the node is about to be taken away (USR1 some minutes ahead, TERM on preemption) goes on to the training
# processes as USR1, which save and end: again and again, as they hear none before they train. torchrun, which would end at once on the first and kill them 30 seconds after
# the second, stands apart and does not see it. Then the exit code is 75, for the job to be requeued.
#
# Takes from the environment: MAIN_NODE, MAIN_PORT, NODES, NODE_RANK (SLURM_NODEID without), GPUS (of a node), ENGINE (a
# file of accelerate_configs), NOTICE_EVERY (seconds between two notices, 10 without).
set -uo pipefail

recipe=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
rank=${NODE_RANK:-$SLURM_NODEID}

# In a session of its own, deaf to USR1; its workers listen again once they train.
(
	trap '' USR1
	exec setsid accelerate launch --config_file "$root/accelerate_configs/$ENGINE.yaml" \
		--num_machines "$NODES" --num_processes "$((NODES * GPUS))" --machine_rank "$rank" \
		--main_process_ip "$MAIN_NODE" --main_process_port "$MAIN_PORT" "$root/recipes/$recipe.py" "$@"
) &
launcher=$!

# Deaf itself to the notices of the group.
pass_on() {
	trap '' USR1 TERM
	while kill -0 "$launcher" 2>/dev/null; do
		pkill -USR1 --parent "$launcher" || true
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
trap notice USR1 TERM

status=0
wait "$launcher" || status=$?
# A notice interrupts the wait.
while kill -0 "$launcher" 2>/dev/null; do
	status=0
	wait "$launcher" || status=$?
done
if ((noticed && status)); then
	exit 75
fi
exit "$status"
