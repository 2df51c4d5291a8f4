"""KTO on single labelled responses, or on pairs taken apart. Trains the embedded model on the embedded benchmark."""

from common import one_line_errors
from offline import RecipeArguments
from results import print_results, write_results
from run_folder import begin_run
from training import can_be_resumed, held_out_generations, load_rows

from trl_ext import KTOConfig, KTOTrainer
from trl_ext.evaluation.plots import KTO_PANELS
from trl_ext.rollouts import end_processes
from trl_ext.trainers.callbacks import GenerationTableCallback
from trl_ext.trainers.policies import remember_base


@can_be_resumed()
def main() -> None:
    """Read the arguments, train, evaluate, and write the run folder."""
    with one_line_errors():
        run = begin_run(
            RecipeArguments, KTOConfig, config="kto", description=KTOConfig.__doc__, name=lambda training: "kto"
        )
        arguments, training = run.arguments, run.training
        splits = load_rows(arguments.dataset_name, arguments.train_split, skip_bad_rows=arguments.skip_bad_rows)
        prompts, held_out = splits.get(arguments.prompt_split), splits.get(arguments.eval_split)
        trainer = run.load_trainer(KTOTrainer, train_dataset=splits[arguments.train_split], eval_dataset=held_out)
        if prompts is not None:
            remember_base(trainer)
        evaluation = None
        if prompts is not None:
            limits = {"max_new_tokens": arguments.max_new_tokens, "batch_size": arguments.generation_batch_size}
            evaluation = held_out_generations(trainer, prompts, arguments, **limits)
    run.open(trainer)
    if evaluation is not None and arguments.generation_eval_every:
        shown = {"every": arguments.generation_eval_every, "prompts": arguments.num_generation_prompts}
        # TRL's own `kl` and `eval_kl` are the loss's estimate from mismatched responses.
        trainer.add_callback(GenerationTableCallback(evaluation, **shown, kl_name="sampled_kl"))

    run.train(trainer)

    comparison = None if evaluation is None else evaluation.compare(arguments.num_eval_prompts, progress=True)
    if trainer.accelerator.is_main_process:
        weights = f"weights {training.desirable_weight:g} and {training.undesirable_weight:g}"
        described = run.describe(
            loss=training.loss_type,
            objective=f"{training.loss_type} (beta {training.beta:g}, {weights})",
            train_responses=len(trainer.train_dataset),
        )
        results = write_results(trainer, comparison, None, described, panels=KTO_PANELS)
        print_results(results, [] if comparison is None else comparison.rows, training.output_dir)
    end_processes(trainer.accelerator)


if __name__ == "__main__":
    main()
