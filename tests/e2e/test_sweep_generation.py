"""The sweep over generation: settings, prompts in templates and behind examples, figures, and the recipe."""

from __future__ import annotations

import random
import statistics
from math import nan

import pytest
import torch

from tests.support import recipes
from tests.support.recipes import read, refused
from trl_ext import load_benchmark
from trl_ext.evaluation.methods.generation_sweep import heat_map_cells, paired_gain, summarize_setting
from trl_ext.rollouts import SamplingSettings, TransformersEngine, generate_responses
from trl_ext.runs.studies.generation_sweep import PromptBuilder
from trl_ext.toy import MODEL_DIR, score

SHORT = ["--num_prompts=6", "--generation_batch_size=12", "--save_every=4", "--use_cpu=true", "--max_new_tokens=12"]


@pytest.fixture(scope="module")
def toy():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(MODEL_DIR), AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def prompts():
    return list(load_benchmark("toy", splits="test_gen")["test_gen"]["prompt"])[:6]


# ---- Decoding ----


def test_no_ngram_comes_twice(toy, prompts):
    """The toy model repeats bigrams when it is greedy; counted with the prompt, none may."""

    def bigrams(generation):
        ids = [*generation.prompt_ids, *generation.response_ids]
        return [*zip(ids, ids[1:], strict=False)]

    def repeats(generations):
        return sum(len(found) - len(set(found)) for found in map(bigrams, generations))

    plain = generate_responses(*toy, prompts, max_new_tokens=24)
    without = generate_responses(*toy, prompts, max_new_tokens=24, no_repeat_ngram_size=2)
    of_prompts = sum(
        len(ids) - 1 - len({*zip(ids, ids[1:], strict=False)}) for ids in (one.prompt_ids for one in plain)
    )
    assert repeats(without) == of_prompts < repeats(plain)


def test_top_k_and_the_penalty_are_what_they_say(toy, prompts):
    """One most likely token is greedy decoding; the penalty divides what is above 0 and multiplies what is below."""
    greedy = generate_responses(*toy, prompts, max_new_tokens=8)
    narrowed = generate_responses(*toy, prompts, max_new_tokens=8, temperature=1.0, top_k=1, seed=5)
    assert [one.response_ids for one in narrowed] == [one.response_ids for one in greedy]
    model, tokenizer = toy
    for generation in generate_responses(*toy, prompts[:2], max_new_tokens=5, repetition_penalty=1.7):
        ids = [*generation.prompt_ids]
        for token in generation.response_ids:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            seen = torch.tensor(sorted(set(ids)))
            penalised = torch.where(logits[seen] > 0, logits[seen] / 1.7, logits[seen] * 1.7)
            assert logits.scatter(0, seen, penalised).argmax() == token
            ids.append(token)


@pytest.mark.parametrize(("name", "value"), [("top_k", -1), ("no_repeat_ngram_size", -1), ("repetition_penalty", 0.0)])
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingSettings(**{name: value})


def test_the_engine_passes_them_on(toy, prompts):
    settings = SamplingSettings(max_new_tokens=24, temperature=0.0, stop=(), no_repeat_ngram_size=2)
    assert TransformersEngine(*toy, settings)(prompts) == generate_responses(
        *toy, prompts, max_new_tokens=24, no_repeat_ngram_size=2
    )


# ---- Figures ----


def group(*scores, reward=None) -> list[dict]:
    return [
        {"response_text": "a b a b", "generated_num_tokens": 5, "finished": True, "reward": reward, "score": score}
        for score in scores
    ]


def test_figures_are_means_over_prompts():
    """Prompts of (0, 1) and (1, 1): .5 and 1, mean .75; bigrams `a b`, `b a`, `a b` of each text: 2 of 12 differ."""
    found = summarize_setting([group(0, 1), group(1, 1, reward=3.0)], win_rate=None)
    assert (found["n_prompts"], found["n_samples"], found["win_rate"]) == (2, 2, None)
    assert found["score"]["mean"] == 0.75 and found["score"]["n"] == 2
    # The deviation is sqrt(1/8), and t has one degree of freedom.
    assert found["score"]["high"] == pytest.approx(0.75 + 12.7062 * 0.25, abs=1e-4)
    assert found["reward"] == {"mean": 3.0, "low": 3.0, "high": 3.0, "n": 1}
    assert found["diagnostics"]["mean_tokens"] == 5
    assert found["diagnostics"]["distinct_2"] == pytest.approx(2 / 12)
    assert summarize_setting([group(None)])["score"] is None
    numbers = random.Random(0)
    values = [numbers.random() for _ in range(100)]
    interval = summarize_setting([group(value) for value in values])["score"]
    half_width = 1.96 * statistics.stdev(values) / 10
    assert interval["high"] - interval["low"] == pytest.approx(2 * half_width, rel=0.1)


def test_gains_are_paired():
    """Both vary by prompt and differ by .1 everywhere: an interval without width, as unpaired ones have not."""
    values = [place / 10 for place in range(10)]
    gain = paired_gain([group(value + 0.1) for value in values], [group(value) for value in values], "score")
    assert (gain["mean"], gain["low"], gain["high"], gain["n"]) == pytest.approx((0.1, 0.1, 0.1, 10))
    gain = paired_gain([group(None), group(1)], [group(5), group(0)], "score")
    assert (gain["mean"], gain["n"]) == (1, 1)
    assert paired_gain([group(None)], [group(1)], "score") is None


def test_cells_average_over_the_other_axes():
    results = [
        {"setting": {"x": x, "y": y, "z": z}, "score": {"mean": value}, "reward": None, "diagnostics": {"n": value}}
        for x, y, z, value in ((1, "a", 0, 1.0), (1, "a", 1, 3.0), (2, "b", 0, 5.0))
    ]
    rows, columns, cells = heat_map_cells(results, ("x", "y"), "score")
    assert (rows, columns) == ([1, 2], ["a", "b"])
    torch.testing.assert_close(torch.tensor(cells), torch.tensor([[2.0, nan], [nan, 5.0]]).double(), equal_nan=True)
    assert heat_map_cells(results, ("y", "x"), "n")[2][0, 0] == 2.0
    assert torch.tensor(heat_map_cells(results, ("x", "y"), "reward")[2]).isnan().all()


# ---- The recipe ----


def parse(monkeypatch, *options):
    return recipes.parse(monkeypatch, "sweep_generation", *SHORT, *options)[0]


def test_every_combination_and_one_of_equal_ones(monkeypatch):
    """Three temperatures by two nuclei: greedy decoding does not depend on the nucleus."""
    arguments = parse(monkeypatch, "--temperatures", "0", "0.5", "1", "--top_ps", "0.8", "1.0")
    assert len(arguments.combinations()) == 6
    assert [(s["temperature"], s["top_p"]) for s in arguments.settings()] == [
        (0, 1.0),
        (0.5, 0.8),
        (0.5, 1.0),
        (1, 0.8),
        (1, 1.0),
    ]
    sampling = arguments.sampling(arguments.settings()[1])
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.8, 12)


def test_prompts_in_templates_and_behind_examples(monkeypatch, tmp_path):
    (tmp_path / "ask.txt").write_text("Q: {question}\nA:")
    name = str(tmp_path / "ask.txt")
    arguments = parse(monkeypatch, "--templates", "chat", f"chat+{name}", name, "--few_shots", "0", "1", "2")

    rows = load_benchmark("toy")["train_gen"]
    asked, answered = rows["prompt"], rows["reference_response_text"]
    builder = PromptBuilder(arguments, [rows[0]])
    known = dict(zip((prompt[0]["content"] for prompt in asked), answered, strict=True))
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say it."}]
    assert builder.build(prompt, {"template": "chat", "few_shot": 0}) == prompt
    one, two = (builder.build(prompt, {"template": "chat", "few_shot": count}) for count in (1, 2))
    assert [message["role"] for message in two] == ["system", *["user", "assistant"] * 2, "user"]
    assert one[:3] == two[:3] and one[0] == prompt[0] and one[-1] == prompt[-1]
    assert all(known[two[place]["content"]] == two[place + 1]["content"] for place in (1, 3))
    within = builder.build(prompt, {"template": f"chat+{name}", "few_shot": 1})
    assert within[-1]["content"] == "Q: Say it.\nA:" and within[1]["content"] == f"Q: {one[1]['content']}\nA:"
    first = f"Q: {one[1]['content']}\nA: {one[2]['content']}"
    assert builder.build(prompt, {"template": name, "few_shot": 1}) == f"{first}\n\nQ: Say it.\nA:"
    assert builder.build("Say it.", {"template": "chat", "few_shot": 0}) == "Say it."
    # A prompt is no example of itself.
    own = builder.build([one[1]], {"template": "chat", "few_shot": 2})
    assert [message["content"] for message in own].count(one[1]["content"]) == 1 and len(own) == 5


@pytest.mark.slow
def test_the_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [*SHORT, "--temperatures", "0", "1", "--top_ps", "0.8", "1", "--samples_per_prompt", "2"]
    recipes.run(monkeypatch, "sweep_generation", *options, "--output_dir", "sweep")
    folder = tmp_path / "sweep"
    results = read(folder, "results.json")
    assert [result["n_samples"] for result in results["sweep"]] == [1, 2, 2]
    greedy = results["sweep"][0]
    rows = read(folder, "samples/0001.jsonl")
    assert greedy["score"]["mean"] == pytest.approx(
        sum(score(row["prompt_text"], row["response_text"], finished=row["finished"]) for row in rows) / 6
    )
    # Greedy decoding of the plain prompt is what it is compared with.
    assert greedy["win_rate"]["half"]["rate"] == 0.5 and greedy["reward"] is None
    highest = max(results["sweep"], key=lambda result: result["score"]["mean"])
    assert results["best"]["setting"] == highest["setting"]
    printed, table = capsys.readouterr().out, (folder / "sweep.md").read_text()
    assert "3 settings on 6 prompts" in printed
    for text in ("temperature", "top_p", "true score", "win rate, ties as half", "distinct-2"):
        assert text in printed and text in table
    assert table.count("\n| ") == 4
    assert (folder / "heat_map.png").read_bytes().startswith(b"\x89PNG")
    _goes_on(folder, results, options, monkeypatch, capsys)


def _goes_on(folder, results, options, monkeypatch, capsys):
    """From a part of the second setting, to the same files and figures."""
    names = [f"samples/000{number}.jsonl" for number in (1, 2, 3)]
    whole = [(folder / name).read_bytes() for name in names]
    (folder / "results.json").unlink()
    (folder / names[2]).unlink()
    (folder / names[1]).write_bytes(whole[1][:-30])
    recipes.run(monkeypatch, "sweep_generation", *options, "--output_dir", "sweep")
    assert "going on in sweep, which holds 17 responses" in capsys.readouterr().out
    assert [(folder / name).read_bytes() for name in names] == whole
    assert read(folder, "results.json")["sweep"] == results["sweep"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperatures", "0.5", "-1"], "temperature must not be negative, got -1.0"),
        (["--templates", "nowhere"], "no prompt template 'nowhere'"),
        (["--few_shots", "-1"], "few_shots must be at least 0, got -1"),
        (["--few_shots", "2", "--few_shot_split", "none"], "no file none.jsonl for the split 'none'"),
        (["--few_shots", "2000"], "2000 examples and one to spare are more than the 1500 rows"),
        (["--judge", "ground_truth", "--dataset_name", "nowhere"], "judge ground_truth is for toy and instructions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_recipe_refuses_in_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in refused(monkeypatch, capsys, "sweep_generation", *SHORT, *options)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["best_of_n", "sweep_generation"])
def test_the_configurations_of_part_two(name, monkeypatch):
    path = recipes.RECIPES / "configs" / "wildchat" / "part2" / f"{name}.yaml"
    arguments, model = recipes.parse(monkeypatch, name, "--config", str(path))
    assert arguments.judge == "none" and model.model_name_or_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (arguments.max_prompt_tokens, arguments.max_new_tokens) == (700, 256)
