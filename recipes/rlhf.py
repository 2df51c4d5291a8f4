"""The three stages of RLHF, and a report on them: SFT, reward models, and policies.

    python recipes/rlhf.py                                  # on the embedded benchmark
    python recipes/rlhf.py --policy_methods ppo,dpo --output_dir runs/my-rlhf
    python recipes/rlhf.py --config recipes/configs/gpt2_hh/rlhf.yaml

Each stage is one of the recipes, run in its own folder. The next call skips finished stages, resumes an interrupted
one from its checkpoint, and refuses one whose settings changed. On SIGTERM the running stage saves, and the pipeline
exits with code 143. `--stages` names the stages to run. The evaluation, which comes last, starts over. Policies start
from the SFT model; base, SFT and every policy are compared on held-out and adversarial prompts.
"""

import os
import shlex

from trl_ext.evaluation.command_line import one_line_errors
from trl_ext.runs.arguments import parse_arguments
from trl_ext.runs.configs import toy_config
from trl_ext.studies.pipeline import (
    RLHFArguments,
    check_evaluation,
    evaluate_pipeline,
    plan_pipeline,
    print_tables,
    write_pipeline_report,
)
from trl_ext.studies.processes import check_runs, print_commands, run_all


def main() -> None:
    """Run the unfinished stages, evaluate, and report; or print the commands."""
    with one_line_errors():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("start the pipeline with python: it launches its stages itself, by --accelerate_config")
        (given,) = parse_arguments((RLHFArguments,), default_config=toy_config("rlhf"), description=__doc__)

        # The stages: SFT, the reward models, and the policies, each a recipe in a folder of its own.
        pipeline = plan_pipeline(given)
        runs = pipeline.asked_for(given.stages)
        check_runs(runs)
        check_evaluation(given)
        if given.dry_run:
            print_commands(runs)
            print(f"# evaluation of {', '.join(pipeline.policies)}, and the report: by recipes/rlhf.py itself")
            return
        if failed := run_all(runs, stop_at_failure=True):
            (stage,) = [run for run in runs if run.name in failed]
            raise ValueError(
                f"the stage {stage.name} failed, for the reason above -- repeat the same command, which resumes "
                f"from this stage, or this stage alone: {shlex.join(stage.command())}"
            )
        if "evaluation" not in given.stages.split(","):
            return

        # Base, SFT and every policy on the same prompts, by both reward models and the true score.
        summary = evaluate_pipeline(given, pipeline)
        written = write_pipeline_report(given, pipeline, summary)
    print_tables(summary)
    print(f"\nin {given.output_dir}: {', '.join(written)}")


if __name__ == "__main__":
    main()
