"""What the ranks of the tests run: several train steps as ranks of one group, their gradients, and losses that fail."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.errors import PenstockError
from penstock.learn.batch import TrainBatch
from penstock.learn.config import TrainWorkerConfig
from penstock.learn.learner import Learner
from penstock.learn.peers import Alone, Peers, ProcessGroupPeers
from penstock.learn.rounds import PeerFailed, Stopped
from penstock.learn.shard import gathered
from penstock.learn.step_metrics import StepReport
from penstock.weights.broadcast import join_store, open_store

TIMEOUT_S = 60.0

PRELOADED = ["penstock.learn.learner", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One train step of a fresh learner."""

    batch: Any
    config: dict[str, Any] = {}
    stopped_rank: int | None = None
    load: Path | None = None
    """Go on from this checkpoint."""
    save: Path | None = None
    """And leave one here."""


class Made(msgspec.Struct, kw_only=True):
    """What it came to on one rank."""

    gradient: dict[str, torch.Tensor] = {}
    """All rows of the last update, as the optimiser was given it."""
    weights: dict[str, torch.Tensor] = {}
    """All rows, afterwards."""
    scores: dict[str, list[Any]] = {}
    report: StepReport | None = None
    error: str = ""


def make(case: Case, model_dir: Path, peers: Peers) -> Made:
    config = TrainWorkerConfig(**{"lr": 1e-3, "max_grad_norm": 1e9, **case.config})
    learner = Learner(config, model_dir, total_steps=4, threads=1, peers=peers)
    made, stopped = Made(), threading.Event()
    if case.stopped_rank == peers.rank:
        stopped.set()

    def before_step(*_: Any) -> None:
        made.gradient = {
            name: gathered(parameter.grad).clone()
            for name, parameter in learner._parameters.items()
            if parameter.grad is not None
        }

    learner._optimizer.register_step_pre_hook(before_step)
    if case.load is not None:
        learner.load(case.load)
    try:
        made.report = learner.train(case.batch, stopped)
    except (PenstockError, PeerFailed, Stopped) as error:
        made.error = type(error).__name__
    if case.save is not None:
        learner.save(case.save)
    made.scores = learner.score(case.batch)
    made.weights = {name: tensor.clone() for name, tensor in learner.tensors()}
    return made


def alone(case: Case, model_dir: Path) -> Made:
    return make(case, model_dir, Alone())


def _rank(rank: int, size: int, port: int, cases: Sequence[Case], model_dir: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    store = join_store("127.0.0.1", port, TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    peers = ProcessGroupPeers(torch.device("cpu"))
    answers.send([_as_numpy(make(case, model_dir, peers)) for case in cases])
    answers.close()
    dist.destroy_process_group()


def _as_numpy(made: Made) -> Made:
    made.gradient = {name: tensor.numpy() for name, tensor in made.gradient.items()}
    made.weights = {name: tensor.numpy() for name, tensor in made.weights.items()}
    return made


def together(size: int, cases: Mapping[str, Case], model_dir: Path) -> dict[str, list[Made]]:
    """Of every case what each of `size` ranks made of it. One set of processes for all cases."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = open_store("127.0.0.1", TIMEOUT_S)
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, size, store.port, list(cases.values()), model_dir, theirs)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        made = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(TIMEOUT_S)
            process.kill()
    return {name: [ranks[index] for ranks in made] for index, name in enumerate(cases)}


def nothing_finite(tokens: Any, config: Any) -> Any:
    """Infinite where the advantages are large, as one rank's are made to be."""
    from penstock.learn.losses import LossTerms

    factor = math.inf if (tokens.advantages.abs() > 100).any() else 1.0
    return LossTerms(-tokens.advantages * tokens.logprobs * factor)


FATAL = "PENSTOCK_TEST_FATAL"
"""Names a file that holds the number of the rank that is to die in its next loss; so does the argument `order`."""


def ppo_that_may_die(tokens: Any, config: Any) -> Any:
    from penstock.learn.losses import PPOLossConfig, ppo

    order = Path(config.arguments.get("order") or os.environ[FATAL])
    # Not where a configuration is checked, which tries it too.
    if dist.is_initialized() and order.exists() and int(order.read_text()) == dist.get_rank():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return ppo(tokens, PPOLossConfig())


def raises_on_one(tokens: Any, config: Any) -> Any:
    from penstock.learn.losses import LossTerms

    if (tokens.advantages.abs() > 100).any():
        raise ZeroDivisionError("of the user's own")
    return LossTerms(-tokens.advantages * tokens.logprobs)


def masked(batch: TrainBatch, keep: Sequence[int]) -> TrainBatch:
    """Only these answers have trained tokens."""
    from dataclasses import replace

    index, groups = -1, []
    for group in batch.groups:
        answers = []
        for answer in group.answers:
            index += 1
            segments = [replace(s, mask=s.mask * (index in keep)) for s in answer.segments]
            answers.append(replace(answer, segments=segments))
        groups.append(replace(group, answers=answers))
    return replace(batch, groups=groups)
