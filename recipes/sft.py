"""Supervised fine-tuning on worked problems. Without arguments it trains the embedded model on embedded additions."""

from trl_ext.held_out.reasoning import ReasoningCallback
from trl_ext.runs.arguments import one_line_errors
from trl_ext.runs.loading import can_be_resumed
from trl_ext.runs.reasoning import SFTArguments, choose_demonstrations, load_problems, sampling_settings
from trl_ext.runs.reasoning_results import end_with_comparison, evaluate_on, require_base
from trl_ext.runs.training_run import begin_run
from trl_ext.trainers import SFTConfig, SFTTrainer


@can_be_resumed()
def main() -> None:
    """Train, evaluate before and after, and write the run folder."""
    with one_line_errors():
        description = "Fine-tune a model on worked problems."
        run = begin_run(SFTArguments, SFTConfig, config="sft", description=description, name=lambda training: "sft")
        arguments = run.arguments
        train = load_problems(arguments, arguments.train_split)
        held_out = load_problems(arguments, arguments.eval_split, "num_eval_prompts")
        demonstrations, kept = choose_demonstrations(arguments, train)
        trainer = run.load_trainer(SFTTrainer, train_dataset=demonstrations)
        evaluation = evaluate_on(trainer, held_out, sampling_settings(arguments, reward=held_out.reward))
        require_base(evaluation, run)
    run.open(trainer)
    every, prompts = arguments.generation_eval_every, arguments.num_generation_prompts
    trainer.add_callback(ReasoningCallback(evaluation, every=every, prompts=prompts))
    budget = run.time_budget(trainer)
    if budget is not None:
        trainer.add_callback(budget)

    run.train(trainer)

    responses = f"{len(demonstrations)} {'correct ' if arguments.filter_correct else ''}responses"
    end_with_comparison(
        run,
        trainer,
        evaluation,
        done=trainer.state.global_step,
        of=trainer.state.max_steps,
        objective=f"SFT ({responses}, {held_out.template_name} prompt)",
        reward=held_out.reward,
        train_problems=len(train.rows),
        train_responses=len(demonstrations),
        filtered=kept,
    )


if __name__ == "__main__":
    main()
