"""Fine-tuning on demonstrations: chosen responses of pairs, responses given with prompts, or the best of n."""

from trl_ext.processes import warn_once_per_run
from trl_ext.runs.arguments import one_line_errors
from trl_ext.runs.loading import can_be_resumed, evaluate_generations, load_rows, optional_split, show_generations
from trl_ext.runs.offline import DemonstrationArguments, load_demonstrations, refuse_completions, shared_prompts
from trl_ext.runs.results import SFT_PANELS, end_with_results
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import SFTConfig, SFTTrainer


@can_be_resumed()
def main() -> None:
    """Train, compare with the initial model, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            DemonstrationArguments,
            SFTConfig,
            config="rlhf_sft",
            description="Fine-tune a model on demonstrations.",
            name=lambda training: "sft-demonstrations",
        )
        arguments = run.arguments
        refuse_completions(arguments)
        splits = load_rows(arguments, run.training.seed)
        train, held_out = load_demonstrations(arguments, splits)
        prompts = optional_split(splits, "prompt_split", arguments, "no generations")
        if prompts is not None and (shared := shared_prompts(train, prompts)):
            warn_once_per_run(
                f"{shared} of the {len(prompts)} prompts of {arguments.prompt_split} are trained on, too"
            )
        trainer = run.load_trainer(SFTTrainer, train_dataset=train, eval_dataset=held_out)
        evaluation = evaluate_generations(trainer, prompts, arguments, **arguments.generation_limits())
    run.open(trainer)
    show_generations(trainer, evaluation, arguments, arguments.generation_eval_every)

    run.train(trainer)

    objective = f"SFT ({len(train)} demonstrations)"
    end_with_results(run, trainer, evaluation, panels=SFT_PANELS, objective=objective, train_responses=len(train))


if __name__ == "__main__":
    main()
