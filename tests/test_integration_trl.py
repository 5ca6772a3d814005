"""Rollouts of TRL through our engine: what GRPO is given, and that it is what the policy of that step says."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, EngineConfig
from ssd.errors import ConfigError, ContextTooLong
from ssd.integrations.trl import Rollouts
from tests.engines import ask
from tests.whole_answers import answers_of

pytest.importorskip("trl", reason="TRL is not installed: pip install 'ssd-serving[trl]'")
pytest.importorskip("datasets", reason="TRL needs datasets")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and transformers' of each other

PROMPTS = ["def main(argv):\n", "import os\n", "class Node:\n    def "]
GROUP = 2
OFF = DraftConfig(num_speculative_tokens=0)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def make_trainer(path: Path, rollouts: Any, **changes: Any) -> Any:
    """Two prompts a step, all of them twice an epoch."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {"num_train_epochs": 2, "temperature": 0.8, "top_p": 0.9, "learning_rate": 1e-4}
    args = GRPOConfig(
        output_dir=str(path),
        per_device_train_batch_size=3 * GROUP,
        num_generations=GROUP,
        max_completion_length=16,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,  # TRL would compute in it by default
        **{**settings, **changes},
    )
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(MODEL_PATH),
        rollout_func=rollouts,
    )


class Noted:
    """Rollouts, and what they returned; of every call also what the policy itself makes of it."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.outputs: list[dict[str, list[Any]]] = []
        self.errors: list[float] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        output = self.rollouts(prompts, trainer)
        self.outputs.append(output)
        for prompt, said, logprobs in zip(*output.values(), strict=True):
            assert len(said) == len(logprobs) > 0
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *said]])
                logits = trainer.model(input_ids=ids, logits_to_keep=len(said) + 1).logits[0, :-1]
            law = torch.log_softmax(truncated(logits / trainer.args.temperature, trainer.args.top_p), -1)
            wanted = law[torch.arange(len(said)), torch.tensor(said)]
            self.errors.append(float((wanted - torch.tensor(logprobs)).abs().max()))
        return output


def truncated(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered = scores.sort(-1, descending=True)
    before = ordered.values.softmax(-1).cumsum(-1) - ordered.values.softmax(-1)
    return scores.masked_fill((before >= top_p).gather(-1, ordered.indices.argsort(-1)), float("-inf"))


def trained(path: Path, draft: DraftConfig, **options: Any) -> Noted:
    config = EngineConfig(max_num_seqs=2, max_model_len=64, batch_invariant="on")
    with Rollouts(config=config, draft=draft, **options) as rollouts:
        noted = Noted(rollouts)
        make_trainer(path, noted).train()
    return noted


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Noted, Noted]]:
    """The same training with drafts and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield tuple(trained(tmp_path_factory.mktemp("run"), draft) for draft in (DraftConfig(), OFF))  # type: ignore[misc]


def test_training_is_the_same_with_drafts_and_without(runs: tuple[Noted, Noted]) -> None:
    drafted, off = runs
    assert len(drafted.outputs) == 2
    for one, other in zip(drafted.outputs, off.outputs, strict=True):
        assert one == other  # prompts, completions and log-probabilities
    assert drafted.rollouts.totals.tokens == off.rollouts.totals.tokens
    assert drafted.rollouts.totals.row_passes < off.rollouts.totals.row_passes


def test_log_probabilities_are_those_of_the_policy_of_that_step(runs: tuple[Noted, Noted]) -> None:
    """Which also says that the weights were taken over: the second step's policy is another."""
    assert max(runs[0].errors) < 1e-3
    assert runs[0].rollouts.totals.loading_s > 0


def test_scoring_a_sample_gives_the_log_probabilities_it_was_drawn_with_to_the_bit(tmp_path: Path) -> None:
    """Generated token by token, with drafts and beside others; scored as a prompt, in one pass. Also of new weights."""
    config = EngineConfig(max_num_seqs=4, max_model_len=64, batch_invariant="on")
    with Rollouts(config=config) as rollouts:
        trainer = make_trainer(tmp_path, rollouts, temperature=1.0, top_p=1.0)
        for step in range(2):
            trainer.state.global_step = step
            output = rollouts(PROMPTS * GROUP, trainer)
            engine = rollouts._engine
            assert engine is not None and engine.target.batch_invariance.is_invariant
            scored = answers_of(
                engine,
                [
                    ask(f"scored {step} {index}", (*prompt, *said), max_tokens=1, prompt_logprobs=0, namespace=None)
                    for index, (prompt, said) in enumerate(
                        zip(output["prompt_ids"], output["completion_ids"], strict=True)
                    )
                ],
            )
            for answer, logprobs in zip(scored, output["logprobs"], strict=True):
                entries = (answer.prompt_logprobs or [])[-len(logprobs) :]
                assert [entry and entry.logprob for entry in entries] == logprobs
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(1.01)
        assert rollouts.totals.row_passes < rollouts.totals.tokens


def test_samples_of_a_prompt_differ_and_come_again_in_the_next_epoch(tmp_path: Path) -> None:
    rollouts = Rollouts(config=EngineConfig(max_num_seqs=4, max_model_len=64))
    with rollouts:
        trainer = make_trainer(tmp_path, rollouts)
        asked = [PROMPTS[0]] * GROUP + [PROMPTS[1]] * GROUP + [PROMPTS[0]] * GROUP  # one is there twice
        trainer.model.train()
        first, again = (rollouts(asked, trainer)["completion_ids"] for _ in range(2))
        assert first == again
        assert len({tuple(said) for said in first}) == 3 * GROUP
        trainer.model.eval()
        others = [rollouts(asked, trainer)["completion_ids"] for _ in range(2)]
        assert others[0] != others[1], "an evaluation's noise is its own"


_ONE_OF_TWO = """
import sys
from pathlib import Path

from ssd.config import EngineConfig
from ssd.integrations.trl import Rollouts
from tests.test_integration_trl import GROUP, PROMPTS, make_trainer

path = Path(sys.argv[1])
with Rollouts(config=EngineConfig(max_num_seqs=2, max_model_len=64)) as rollouts:
    trainer = make_trainer(path, rollouts)
    trainer.model.train()
    said = rollouts([PROMPTS[0]] * GROUP, trainer)["completion_ids"]
(path / str(trainer.accelerator.process_index)).write_text(repr(said))
"""


@pytest.mark.slow
def test_groups_of_a_prompt_differ_on_two_processes_too(tmp_path: Path) -> None:
    script = tmp_path / "one_of_two.py"
    script.write_text(_ONE_OF_TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script), str(tmp_path)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [tuple(text) for rank in "01" for text in ast.literal_eval((tmp_path / rank).read_text())]
    assert len(set(said)) == 2 * GROUP


def test_noise_is_drawn_anew_after_so_many_epochs(tmp_path: Path) -> None:
    with Rollouts(config=EngineConfig(max_num_seqs=4, max_model_len=64), fresh_noise_every=2) as rollouts:
        trainer = make_trainer(tmp_path, rollouts)
        trainer.model.train()
        said = []
        for epoch in (0.0, 1.5, 2.0, 3.9):
            trainer.state.epoch = epoch
            said.append(rollouts([PROMPTS[0]] * GROUP, trainer)["completion_ids"])
        assert said[0] == said[1] != said[2] == said[3]


def test_a_call_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with Rollouts(config=EngineConfig(max_num_seqs=2, max_model_len=64)) as rollouts:
        trainer = make_trainer(tmp_path, rollouts)
        trainer.model.train()
        asked = [PROMPTS[0]] * GROUP
        said = rollouts(asked, trainer)["completion_ids"]
        for next_step in (0, 1):
            with pytest.raises(ContextTooLong):
                rollouts([*asked, "import os\n" * 40], trainer)
            trainer.state.global_step = next_step
            assert rollouts(asked, trainer)["completion_ids"] == said


def test_conversations_are_rendered_as_the_trainer_does(tmp_path: Path) -> None:
    with Rollouts(config=EngineConfig(max_num_seqs=2, max_model_len=64)) as rollouts:
        trainer = make_trainer(tmp_path, rollouts)
        asked = [[{"role": "user", "content": "Open a file."}]] * GROUP
        assert rollouts(asked, trainer)["prompt_ids"] == trainer._tokenize_prompts(asked)[0]


def test_what_is_not_honoured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fresh_noise_every"):
        Rollouts(fresh_noise_every=-1)
    trainer = make_trainer(tmp_path, Rollouts(), generation_kwargs={"num_beams": 2})
    with pytest.raises(ConfigError, match="generation_kwargs"):
        Rollouts().open(trainer)
