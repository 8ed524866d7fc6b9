"""Training on chats: the loss is the mean over the trained tokens of the global batch, in every world."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from builders.train import chats, node, plain
from builders.train.course import HALF, Course
from builders.train.gradients import check, whole_gradient
from concertina_state.format.read_plan import Box
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import initial_value

LENGTH = 96
MODEL = {"layers": 2, "heads": 4, "kvHeads": 2, "hiddenDim": 44, "vocabSize": 337, "sequenceLength": LENGTH}
GRADIENTS = {
    "fsdp": (3, {}),
    "fsdp x tensor, in chunks": (4, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "context": (2, {"context": 2}),
}
LAYOUTS = {"two": (2, {}), "fsdp x tensor": (4, {"tensor": 2})}


@pytest.fixture(scope="module")
def tuned(trainer, tmp_path_factory):
    """Chats of very different lengths, of which a small and varying part is trained."""
    folder = tmp_path_factory.mktemp("chats")
    records = [
        chats.chat(*range(n, n + 1 + n % 2), system="You name numbers. " * (1 + n % 3)) for n in range(60)
    ]  # fmt: skip
    assert chats.built(folder / "data", chats.tokenizer(folder / "model"), records, LENGTH) == 0
    data = {"uri": str(folder / "data"), "documents": "Packed"}
    return {**trainer, "data": data, "model": {**trainer["model"], **MODEL}}


def mean_gradient(config):
    """Return the gradient and the loss of the trained tokens of one batch, in a plain loop over them in float64."""
    model = Decoder(config.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.model, config.seed))
    reader = Reader(config.data, LENGTH, config.seed)
    found = reader.sequences(np.arange(100, 100 + config.global_batch_size))
    ids = torch.from_numpy(np.ascontiguousarray(found.document_ids))
    tokens = torch.from_numpy(found.tokens)
    logits = model.double()(tokens[:, :-1], ids)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, column in zip(*np.nonzero(found.weights), strict=True):
        total = total - F.log_softmax(logits[row, column], 0)[tokens[row, column + 1]]
        count += 1
    loss = total / count
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item(), count


@pytest.mark.parametrize("layout", GRADIENTS)
def test_the_gradient_is_the_mean_over_the_trained_tokens(parent, tuned, tmp_path, layout):
    world, parallelism = GRADIENTS[layout]
    config = TrainerConfig.model_validate(tuned)
    gradients, loss, count = mean_gradient(config)
    assert 0 < count < config.global_batch_size * LENGTH / 3
    # The parts of the vocabulary have 169 and 168 rows, so only the larger one decides how many rows a chunk has.
    variables = {"CHUNK_LOGITS": str(3 * 168)} if "chunks" in layout else {}
    found = whole_gradient(
        parent, tuned, world, tmp_path, parallelism=parallelism, dtype=torch.float64, **variables
    )  # fmt: skip
    check(found, gradients, loss)


def test_a_run_goes_on_in_a_larger_world_with_another_layout(parent, tuned, folder_of_module):
    trainer = {**tuned, "steps": 2 * HALF, "microBatchSize": 4, "snapshot": {"everySteps": HALF}}
    course = Course(parent, trainer, LAYOUTS, folder_of_module)
    course.run(2, course.leg("two"))
    course.run(4, course.leg("fsdp x tensor", "two"))


def test_metrics_count_all_tokens(parent, tuned, folder):
    outcome = node.Job(folder, parent, {**tuned, "steps": 2}).run(1)
    assert outcome.progress[-1].tokens == 2 * tuned["globalBatchSize"] * LENGTH
    assert outcome.losses[1] == pytest.approx(plain.losses({**tuned, "steps": 2})[1], rel=1e-5)
