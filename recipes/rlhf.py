"""The three stages of RLHF, and what came of them: SFT, reward models, policies, and one report.

    python recipes/rlhf.py                                  # on the embedded benchmark
    python recipes/rlhf.py --policy_methods ppo,dpo --output_dir runs/my-rlhf
    python recipes/rlhf.py --config recipes/configs/gpt2_hh/rlhf.yaml

Each stage is one of the recipes, run in a folder of its own. Stages that are done are skipped by the next call, an
interrupted one is taken up from its checkpoint, and one whose settings changed is refused. On SIGTERM the stage under
way saves, and the pipeline ends with code 75, for its job to be requeued; the evaluation, which comes last, begins
anew. Policies start from the SFT model; base, SFT and every policy are compared on held-out and on adversarial
prompts.
"""

from __future__ import annotations

import os
import shlex

import common
import sweep
from rlhf_evaluation import check_evaluation, evaluate_pipeline
from rlhf_plan import RECORD_NAME, Pipeline, RLHFArguments, Stage, check_record, plan_pipeline
from rlhf_report import print_tables, write_pipeline_report
from stage_process import run_or_stop

from trl_ext.evaluation.command_line import one_line_errors
from trl_ext.files import write_json


def main() -> None:
    """Run what is not finished, evaluate, and report; or print the commands."""
    with one_line_errors():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("start the pipeline with python: it launches its stages itself, by --accelerate_config")
        try:
            (given,) = common.parse_arguments(
                (RLHFArguments,), default_config=common.RECIPES / "configs" / "toy" / "rlhf.yaml", description=__doc__
            )
        except TypeError as error:
            raise ValueError(str(error)) from error
        pipeline = plan_pipeline(given)
        for stage in pipeline.stages:
            check_record(stage)
            sweep.check_runs(stage.study, [stage.run])
        check_evaluation(given)
        if given.dry_run:
            _print_commands(pipeline)
            return
        for number, stage in enumerate(pipeline.stages, start=1):
            run_stage(stage, f"{number} of {len(pipeline.stages)}")
        summary = evaluate_pipeline(given, pipeline)
        written = write_pipeline_report(given, pipeline, summary)
    print_tables(summary)
    print(f"\nin {given.output_dir}: {', '.join(written)}")


def run_stage(stage: Stage, place: str) -> None:
    """Run a stage that is not finished.

    Raises:
        ValueError: it failed; the message has its error and the command.
        KeyboardInterrupt, SystemExit: the pipeline was told to end meanwhile, with code 75 unless from a terminal.
    """
    state = sweep.state_of(stage.study, stage.run)
    print(f"\n=== stage {place}, {stage.name}: {state}", flush=True)
    if state == "finished":
        return
    command = stage.study.command(stage.run)
    write_json(stage.folder / RECORD_NAME, stage.record())
    ended = run_or_stop(command, "this stage")
    code, last = ended.code, _last_error(ended.error_output)
    if code or sweep.state_of(stage.study, stage.run) != "finished":
        said = f": {last}" if last else ""
        raise ValueError(
            f"the stage {stage.name} failed with exit status {code}{said} -- repeat the same command, which goes on "
            f"from this stage, or this stage alone: {shlex.join(stage.study.command(stage.run))}"
        )


def _last_error(text: str) -> str:
    """The last line that names an error; of a traceback that is its last."""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    named = [line for line in lines if line.startswith("error: ")]
    # The launcher adds a traceback of its own to that of the recipe.
    other = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    other = [line for line in other if "CalledProcessError" not in line]
    return next(iter([*named[-1:], *other[-1:]]), "").removeprefix("error: ")


def _print_commands(pipeline: Pipeline) -> None:
    for stage in pipeline.stages:
        print(
            f"# {stage.name}: {sweep.state_of(stage.study, stage.run)}\n{shlex.join(stage.study.command(stage.run))}"
        )
    print(f"# evaluation of {', '.join(pipeline.policies)}, and the report: by recipes/rlhf.py itself")


if __name__ == "__main__":
    main()
