"""Submissions: model names, generation, scores and packing."""

import json
import logging
import re
import zipfile

import pytest

from tests.support.files import read_rows, write_rows
from tests.support.public_evaluation import response, write_prompts
from tests.support.reward_adapters import save_full_model
from trl_ext.evaluation.submissions.assets import (
    load_prompts,
    token_counter,
)
from trl_ext.evaluation.submissions.submission import (
    build_submission,
    generate_submission_file,
    pack_submission,
    score_submission_file,
)
from trl_ext.files import brief
from trl_ext.models import resolve_model_path

TEXTS = ["Say red.", "Say a much longer thing, please, and then stop.", "Why?", "Tell me of the sea.", "And?"]


@pytest.fixture
def short_tokenizer(tiny_model_path, monkeypatch):
    """The tokenizer that everything loads, with a limit of 100 tokens; what it warns of is seen by `caplog`."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    tokenizer.model_max_length, tokenizer.used = 100, False

    def load(*arguments, **keywords):
        tokenizer.used = True
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    return tokenizer


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("assets") / "prompts.jsonl", TEXTS)


class TestModelNames:
    """What is taken for a mistyped path is refused at once, and not looked for on the hub for over a minute."""

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path, monkeypatch):
        (tmp_path / "models" / "aot-toy").mkdir(parents=True)
        (tmp_path / "models" / "aot-toy" / "config.json").write_text("{}")
        (tmp_path / "models" / "log").mkdir()
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("name", ["runs/no", "./no", "/no/such", "~/no", "a/b/c", "no/", "no.gguf", "models/aot"])
    def test_mistyped(self, name):
        with pytest.raises(FileNotFoundError, match=f"no model folder '{name}': give a folder, a GGUF file"):
            resolve_model_path(name)

    def test_its_neighbours_are_named(self):
        with pytest.raises(FileNotFoundError, match="or smollm2; models holds aot-toy$"):
            resolve_model_path("models/aot")

    @pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-1.5B-Instruct", "models/aot-toy"])
    def test_names_of_the_hub_and_folders(self, name):
        assert resolve_model_path(name) == name

    def test_a_folder_that_is_no_model(self):
        with pytest.raises(FileNotFoundError, match="the folder 'models/log' holds no config.json"):
            resolve_model_path("models/log")


class TestGenerate:
    def test_rows_are_the_models_own_greedy_responses(self, tiny_model_path, prompts_file, tmp_path):
        """Against transformers' own loop over single tokens, one prompt at a time."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        out = tmp_path / "policy_generations" / "aot.jsonl"
        generate_submission_file(tiny_model_path, out, prompts_jsonl=prompts_file, max_new_tokens=6, batch_size=2)
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
        rows = read_rows(out)
        assert [row["row_id"] for row in rows] == [f"p{i}" for i in range(5)]
        assert [row["prompt_text"] for row in rows] == TEXTS
        for row, text in zip(rows, TEXTS, strict=True):
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            ids, response_ids = tokenizer(rendered)["input_ids"], []
            while len(response_ids) < 6 and tokenizer.eos_token_id not in response_ids:
                logits = model(torch.tensor([ids + response_ids])).logits[0, -1]
                response_ids.append(int(logits.argmax()))
            assert row["generated_num_tokens"] == len(response_ids)
            assert row["response_text"] == tokenizer.decode(response_ids, skip_special_tokens=True)
            assert set(row) == {"row_id", "prompt_text", "response_text", "generated_num_tokens"}

    def test_an_interrupted_run_goes_on(self, tiny_model_path, prompts_file, tmp_path, monkeypatch):
        from trl_ext import rollouts

        whole, out = tmp_path / "whole.jsonl", tmp_path / "aot.jsonl"
        settings = {"prompts_jsonl": prompts_file, "max_new_tokens": 6, "batch_size": 2}
        generate_submission_file(tiny_model_path, whole, **settings)
        original, asked = rollouts.generate_responses, []

        def stops_at_the_second_batch(model, tokenizer, prompts, **keywords):
            asked.append(len(prompts))
            if len(asked) == 2:
                raise KeyboardInterrupt
            return original(model, tokenizer, prompts, **keywords)

        monkeypatch.setattr(rollouts, "generate_responses", stops_at_the_second_batch)
        with pytest.raises(KeyboardInterrupt):
            generate_submission_file(tiny_model_path, out, **settings)
        assert len(read_rows(out)) == 2
        generate_submission_file(tiny_model_path, out, **settings)
        assert asked == [2, 2, 2, 1]
        assert out.read_bytes() == whole.read_bytes()
        # With all rows there, nothing is generated.
        generate_submission_file(tiny_model_path, out, **settings)
        assert len(asked) == 4

    def test_another_model_or_other_prompts(self, tiny_model_path, prompts_file, tmp_path):
        from tests.support.tiny import save_tiny_model

        out, settings = tmp_path / "aot.jsonl", {"prompts_jsonl": prompts_file, "max_new_tokens": 2}
        generate_submission_file(tiny_model_path, out, **settings)
        before = out.read_bytes()
        save_tiny_model(tmp_path / "other", seed=1)
        with pytest.raises(FileExistsError, match="holds rows made with the model .*, not with the model .*other"):
            generate_submission_file(tmp_path / "other", out, **settings)
        other_prompts = write_prompts(tmp_path / "prompts.jsonl", [*TEXTS[:4], "Else?"])
        with pytest.raises(FileExistsError, match="prompts_sha256"):
            generate_submission_file(tiny_model_path, out, **{**settings, "prompts_jsonl": other_prompts})
        assert out.read_bytes() == before
        file = generate_submission_file(tmp_path / "other", out, **settings, overwrite=True)
        assert file.settings["model"] == str(tmp_path / "other")

    def test_an_adapter(self, tiny_model_path, prompts_file, tmp_path):
        """A LoRA whose output is far from zero answers as its merged model does, and not as its base."""
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from tests.support.reward_adapters import randomize

        base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
        settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
        adapted = get_peft_model(base, LoraConfig(**settings))
        randomize(adapted, "lora_", seed=3, scale=0.5)
        adapted.save_pretrained(tmp_path / "adapter")
        merged = adapted.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path / "merged")
        texts = {}
        for name, model in {"adapter": "adapter", "merged": "merged", "base": tiny_model_path}.items():
            model = model if name == "base" else tmp_path / model
            file = generate_submission_file(
                model, tmp_path / f"{name}.jsonl", prompts_jsonl=prompts_file, max_new_tokens=6
            )
            texts[name] = [row["response_text"] for row in file.rows.values()]
        assert texts["adapter"] == texts["merged"]
        assert texts["adapter"] != texts["base"]

    def test_the_hash_of_an_adapter_is_of_its_base_too(self, tmp_path):
        from trl_ext.models.loading import model_sha256

        base, adapter = tmp_path / "base", tmp_path / "adapter"
        for folder, name, content in (
            (base, "config.json", "{}"),
            (base, "model.safetensors", "weights"),
            (adapter, "adapter_config.json", json.dumps({"base_model_name_or_path": str(base)})),
        ):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(content)
        hashes = [model_sha256(adapter), model_sha256(adapter)]
        (base / "model.safetensors").write_text("others")
        hashes.append(model_sha256(adapter))
        (base / "README.md").write_text("says nothing to the model")
        hashes.append(model_sha256(adapter))
        assert hashes[0] == hashes[1] != hashes[2] == hashes[3]

    def test_a_reward_model_cannot_generate(self, tiny_model_path, prompts_file, tmp_path):
        folder = save_full_model(tiny_model_path, tmp_path / "reward")
        with pytest.raises(ValueError, match="is a reward model, which cannot generate"):
            generate_submission_file(folder, tmp_path / "x.jsonl", prompts_jsonl=prompts_file)

    def test_long_prompts_are_cut_without_a_warning(self, tiny_model_path, tmp_path, short_tokenizer, caplog):
        """A prompt of over 250 bytes, each a token, of which the last 40 are read."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", ["word " * 50])
        settings = {"prompts_jsonl": prompts, "max_new_tokens": 2, "max_prompt_tokens": 40}
        generate_submission_file(tiny_model_path, tmp_path / "aot.jsonl", **settings)
        assert short_tokenizer.used and "Token indices" not in caplog.text

    def test_a_model_that_the_hub_has_not_is_asked_for_once(self, prompts_file, tmp_path, monkeypatch):
        import huggingface_hub
        from transformers import AutoModelForCausalLM

        asked = []

        def unreachable(self, name, **keywords):
            asked.append(name)
            raise ConnectionError("Name or service not known")

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("asked again"))
        with pytest.raises(FileNotFoundError, match=r"no model 'runz/nosuch'\. There is no such folder, .* not known"):
            generate_submission_file("runz/nosuch", tmp_path / "x.jsonl", prompts_jsonl=prompts_file)
        assert asked == ["runz/nosuch"]


@pytest.fixture(scope="module")
def assets(tiny_model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    pairs = [
        {"row_id": f"q{i}", "prompt_text": text, "chosen_text": "yes" + "!" * i, "rejected_text": "no"}
        for i, text in enumerate(TEXTS)
    ]
    return {
        "model": tiny_model_path,
        "reward_model": save_full_model(tiny_model_path, folder / "reward"),
        "prompts": write_prompts(folder / "prompts.jsonl", TEXTS),
        "prefs": write_rows(folder / "prefs.jsonl", pairs),
    }


class TestBuildScoreAndPack:
    def build(self, assets, out, **keywords):
        arguments = {"reward_model": assets["reward_model"], "prefs_jsonl": assets["prefs"], **keywords}
        return build_submission(
            {"aot": assets["model"], "offline_best": assets["model"]},
            out,
            prompts_jsonl=assets["prompts"],
            max_new_tokens=4,
            **arguments,
        )

    @pytest.mark.parametrize("name", ["../x", "a\\b", "", "..", "a\nb"])
    def test_a_name_that_is_no_files_is_refused_before_a_model_is_loaded(self, name, tmp_path):
        message = f"{brief(name)!r} cannot be a policy's name, which is that of its file: give letters"
        with pytest.raises(ValueError, match=re.escape(message)):
            build_submission({"aot": tmp_path / "no_model", name: tmp_path / "no_model"}, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_layout_and_scores(self, assets, tmp_path):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        files = self.build(assets, tmp_path)
        assert [str(file.relative_to(tmp_path)) for file in files] == [
            "policy_generations/aot.jsonl",
            "part2/offline_best.jsonl",
            "reward_model/public_test_pref_scores.jsonl",
        ]
        model = AutoModelForSequenceClassification.from_pretrained(assets["reward_model"]).eval()
        tokenizer = AutoTokenizer.from_pretrained(assets["reward_model"])
        for index, row in enumerate(read_rows(files[2])):
            assert row["row_id"] == f"q{index}"
            for name, text in (("chosen_score", "yes" + "!" * index), ("rejected_score", "no")):
                messages = [{"role": "user", "content": TEXTS[index]}, {"role": "assistant", "content": text}]
                ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
                with torch.no_grad():
                    expected = float(model(torch.tensor([ids])).logits)
                assert row[name] == pytest.approx(expected, abs=1e-4)

    def test_long_pairs_are_cut_without_a_warning(self, assets, tmp_path, short_tokenizer, caplog):
        """A prompt and a response of 250 bytes and more, each a token, under the 512 that the reward model reads."""
        pair = {"row_id": "q", "prompt_text": "word " * 50, "chosen_text": "yes " * 70, "rejected_text": "no"}
        pairs = write_rows(tmp_path / "prefs.jsonl", [pair])
        score_submission_file(assets["reward_model"], tmp_path / "scores.jsonl", prefs_jsonl=pairs)
        assert short_tokenizer.used and "Token indices" not in caplog.text

    def test_scores_are_not_computed_twice(self, assets, tmp_path, monkeypatch):
        from trl_ext.rewards import RewardModel

        out = tmp_path / "scores.jsonl"
        score_submission_file(assets["reward_model"], out, prefs_jsonl=assets["prefs"])
        before = out.read_bytes()
        monkeypatch.setattr(RewardModel, "score", lambda *a, **k: pytest.fail("scored again"))
        score_submission_file(assets["reward_model"], out, prefs_jsonl=assets["prefs"])
        assert out.read_bytes() == before

    def test_pack(self, assets, tmp_path):
        folder, archive = tmp_path / "submission", tmp_path / "s.zip"
        self.build(assets, folder)
        options = {"prompts_jsonl": assets["prompts"], "prefs_jsonl": assets["prefs"], "max_new_tokens": 4}
        packed = pack_submission(folder, archive, **options)
        with zipfile.ZipFile(archive) as file:
            assert file.namelist() == [
                "part2/offline_best.jsonl",
                "policy_generations/aot.jsonl",
                "reward_model/public_test_pref_scores.jsonl",
            ]
            for name in file.namelist():
                assert file.read(name) == (folder / name).read_bytes()
        assert packed["missing"] == [
            *(f"policy_generations/{name}.jsonl" for name in ("dpo", "ipo", "grpo", "drgrpo", "gspo")),
            "part2/online_best.jsonl",
        ]
        with pytest.raises(FileExistsError, match="replace it with --overwrite"):
            pack_submission(folder, archive, **options)
        assert pack_submission(folder, archive, **options, overwrite=True)["sha256"] == packed["sha256"]

    def test_what_is_packed_is_what_can_be_graded(self, tmp_path):
        """One text of 60 words beside a row that says 9 tokens: over the 48 of the embedded prompts by its own count.

        Packing and grading name the same row in the same words, by the embedded tokenizer.
        """
        from trl_ext.evaluation import grade_submission

        prompts = load_prompts()
        rows = [response(row["row_id"], "word", 9, row["prompt_text"]) for row in prompts]
        rows[7]["response_text"] = "word, " * 60
        counted = token_counter("toy")(rows[7]["response_text"])
        path = write_rows(tmp_path / "submission" / "policy_generations" / "aot.jsonl", rows)
        message = (
            f"{path}: row_id {rows[7]['row_id']}: over the token budget: the text has {counted} tokens, at most 48"
        )
        (grade,) = grade_submission(tmp_path / "submission", {"aot": 0.5}).grades
        assert [problem.startswith(message) for problem in grade.problems] == [True]
        with pytest.raises(ValueError) as refused:
            pack_submission(tmp_path / "submission", tmp_path / "s.zip", ["aot"])
        assert str(refused.value) == grade.problems[0]

    def test_pack_nothing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="holds no file of a submission, such as reward_model/"):
            pack_submission(tmp_path, tmp_path / "s.zip")
