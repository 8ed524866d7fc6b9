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
from concertina_trainer.data.read.readers import Readers
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import initial_value
from concertina_trainer.training.evaluation import SEED, evaluation_readers

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
    tokenizer = chats.tokenizer(folder / "model")
    assert chats.built(folder / "data", tokenizer, records, LENGTH, "--validation", "0.3") == 0
    data = {"uri": str(folder / "data"), "documents": "Packed"}
    return {**trainer, "data": data, "model": {**trainer["model"], **MODEL}}


def mean_loss(model, found):
    """Return the mean loss of the trained tokens of some sequences in a plain loop over them, and their number."""
    ids = torch.from_numpy(np.ascontiguousarray(found.document_ids))
    tokens = torch.from_numpy(found.tokens)
    logits = model.double()(tokens[:, :-1], ids)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, column in zip(*np.nonzero(found.weights), strict=True):
        total = total - F.log_softmax(logits[row, column], 0)[tokens[row, column + 1]]
        count += 1
    return total / count, count


def mean_gradient(config):
    """Return the gradient and the loss of the trained tokens of one batch, and their number."""
    model = Decoder(config.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.model, config.seed))
    reader = Reader(config.data, LENGTH, config.seed)
    loss, count = mean_loss(model, reader.sequences(np.arange(100, 100 + config.global_batch_size)))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item(), count


CHUNKS = (
    "tests/train/trainer/test_chats.py::test_the_gradient_is_the_mean_over_the_trained_tokens[fsdp x tensor, in chunks]"
)


@pytest.mark.parametrize(
    "layout",
    [name if name != "fsdp" else pytest.param(name, marks=pytest.mark.long(law=CHUNKS)) for name in GRADIENTS],
)
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


def test_metrics_count_all_tokens_and_an_evaluation_the_trained_ones(parent, tuned, folder):
    count = tuned["globalBatchSize"] + 1
    trainer = {**tuned, "steps": 2, "evaluation": {"sequences": count}}
    outcome = node.Job(folder, parent, trainer).run(2)
    assert outcome.progress[-1].tokens == 2 * tuned["globalBatchSize"] * LENGTH
    expected = plain.trained(trainer)
    assert outcome.losses[1] == pytest.approx(expected.losses[1], rel=1e-5)

    config = TrainerConfig.model_validate(trainer)
    [aside] = evaluation_readers(config, Reader(config.data, LENGTH, SEED), Readers()).values()
    assert aside.epoch_size >= count
    model = Decoder(config.model)
    model.load_state_dict(expected.weights)
    loss, trained = mean_loss(model, aside.sequences(np.arange(count)))
    assert trained < aside.predicted(0, count).sum()
    assert outcome.progress[-1].evaluated.loss == pytest.approx(loss.item(), rel=1e-5)
