"""Tests of the momentum exchange between replicas."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import scantling as sc
from scantling.comm import allreduce_wire_bytes
from scantling.comm.config import Values
from scantling.comm.consistency import describe_decoder
from scantling.comm.exchange import MomentumExchange
from scantling.comm.layout import make_block_groups, make_spec
from scantling.comm.local_steps import outer_exchange
from scantling.errors import NonFiniteError, PayloadError, ReplicaError, UserError
from tests.comm.replicas import ThreadGroup, together

DENSE = {"chunk": 64, "topk": 8, "values": "sign", "dense": "sign", "transform": "dct", "decay": 0.9}
SHAPES = {
    "square": (70, 130),
    "long": (1021, 7),
    "stack": (3, 40, 50),
    "conv": (12, 20, 3, 8),
    "vector": (300,),
    "one": (),
}
EMBEDDING = (50, 96)


def make_params(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in (*SHAPES.values(), EMBEDDING)]


def group_by_param(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    named = list(zip((*SHAPES, "embedding"), params, strict=True))
    return [{"params": named[:-1]}, {"params": named[-1:], "role": "embedding", "matrix_dims": ((0,), (1,))}]


def gradient(rank: int, step: int, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(shape, generator=generator)


def make_exchange(replicas: ThreadGroup | None, params: list[nn.Parameter], **options: Any) -> MomentumExchange:
    made = MomentumExchange(group_by_param(params), **{"topk": 8, "chunk": 16, **options})
    if replicas is not None:
        made.replicas = replicas
    return made


def residuals(made: MomentumExchange, params: list[nn.Parameter]) -> list[Tensor]:
    return [made.state.get(param, {}).get("residual", torch.zeros_like(param)) for param in params]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("strategy", ["all_gather", "owner"])
@pytest.mark.parametrize("values", get_args(Values))
@pytest.mark.parametrize("topk", [8, 256])
def test_error_feedback_loses_nothing(size: int, strategy: str, values: str, topk: int) -> None:
    """Without decay, the mean gradient over replicas, summed over steps, equals the applied updates plus residuals."""

    def work(replicas: ThreadGroup) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        params = make_params()
        made = make_exchange(replicas, params, decay=1.0, topk=topk, values=values, dense=values, exchange=strategy)
        given = [torch.zeros_like(param) for param in params]
        applied = [torch.zeros_like(param) for param in params]
        for step in range(4):
            for param, sum_of in zip(params, given, strict=True):
                param.grad = gradient(replicas.rank, step, param.shape)
                sum_of += param.grad
            assert made.exchange()
            for param, sum_of in zip(params, applied, strict=True):
                sum_of += param.grad
        assert made.wire_bytes == made.planned_wire_bytes()
        return given, applied, residuals(made, params)

    found = together(size, work)
    for place in range(len(SHAPES) + 1):
        mean_given = torch.stack([given[place] for given, _, _ in found]).mean(0)
        mean_left = torch.stack([left[place] for _, _, left in found]).mean(0)
        assert all(torch.equal(applied[place], found[0][1][place]) for _, applied, _ in found)
        torch.testing.assert_close(found[0][1][place] + mean_left, mean_given, rtol=1e-4, atol=2e-5)


def test_exchange_of_all_coefficients_is_the_mean_gradient() -> None:
    def work(replicas: ThreadGroup) -> list[Tensor]:
        params = make_params()
        made = make_exchange(replicas, params, topk=256, values="fp32", dense="fp32")
        for param in params:
            param.grad = gradient(replicas.rank, 0, param.shape)
        made.exchange()
        return [param.grad for param in params]

    found = together(3, work)
    for place, param in enumerate(make_params()):
        wanted = torch.stack([gradient(rank, 0, param.shape) for rank in range(3)]).mean(0)
        torch.testing.assert_close(found[0][place], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["all_gather", "owner"])
def test_exchange_skips_nonfinite_rank(strategy: str) -> None:
    def work(replicas: ThreadGroup) -> tuple[list[list[Tensor]], MomentumExchange]:
        params = make_params()
        made = make_exchange(replicas, params, topk=256, values="fp32", dense="fp32", exchange=strategy, decay=0.0)
        steps = []
        for step in range(3):
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape)
            if step == 1 and replicas.rank == 1:
                params[0].grad[3, 4] = torch.nan
            made.exchange()
            assert made.nonfinite_ranks == ([1] if step == 1 else [])
            steps.append([param.grad for param in params])
        return steps, made

    found = together(3, work)
    for step, ranks in enumerate([(0, 1, 2), (0, 2), (0, 1, 2)]):
        for place, param in enumerate(make_params()):
            wanted = torch.stack([gradient(rank, step, param.shape) for rank in ranks]).mean(0)
            assert torch.equal(found[0][0][step][place], found[1][0][step][place])
            torch.testing.assert_close(found[1][0][step][place], wanted, rtol=1e-4, atol=1e-5)


def test_exchange_stops_when_all_ranks_are_nonfinite() -> None:
    def work(replicas: ThreadGroup) -> tuple[str, list[Tensor]]:
        params = make_params()
        made = make_exchange(replicas, params)
        for param in params:
            param.grad = gradient(replicas.rank, 0, param.shape)
        made.exchange()
        before = [each.clone() for each in residuals(made, params)]
        for param in params:
            param.grad = torch.full_like(param, torch.inf)
        with pytest.raises(NonFiniteError, match="all 2 processes") as error:
            made.exchange()
        assert all(map(torch.equal, before, residuals(made, params)))
        return str(error.value), before

    first, second = together(2, work)
    assert first[0] == second[0]


def test_exchange_names_tensor_and_rank_of_other_weights() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        if replicas.rank == 2:
            with torch.no_grad():
                params[2][1, 2, 3] += 1e-6
        make_exchange(replicas, params).exchange()

    with pytest.raises(UserError, match="rank 2 differs from the others: stack has other values"):
        together(3, work)


@pytest.mark.parametrize("begun", [False, True])
def test_load_compares_replicas_again(begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A replica that has already exchanged logs a warning, because it may be the only one that loads a state."""

    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params)
        assert made.strategy
        if begun:
            made.exchange()
        made.load_state_dict(made.state_dict())
        made.exchange()
        made.load_state_dict(made.state_dict())
        with torch.no_grad():
            params[2][1, 2, 3] += 1e-6 * replicas.rank
        made.exchange()

    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=r"rank 1 differs .* stack has other values"):
        together(2, work)
    assert caplog.text.count("or a state was loaded; comparing") == 2 * (1 + begun)


def test_exchange_names_rank_of_other_options() -> None:
    def work(replicas: ThreadGroup) -> None:
        make_exchange(replicas, make_params(), topk=4 if replicas.rank == 1 else 8).exchange()

    with pytest.raises(UserError, match=r"rank 1 differs from the others in square: it has topk 4; they have topk 8$"):
        together(3, work)


@pytest.fixture
def unset_precision() -> Iterator[None]:
    """Reset the precision that other tests of the process have set, through both APIs."""
    torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
    yield
    torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("module", [torch.backends, torch.backends.cuda.matmul], ids=["all", "matmul"])
def test_comparison_reads_precision_of_products(module: Any, unset_precision: None) -> None:
    """The getter of the old API raises if the newer settings, which transformers uses, were set."""

    def describe() -> str:
        return describe_decoder(torch.device("cuda"), has_products=True)

    plain = describe()
    assert plain.endswith("fp32 products of precision ieee")
    module.fp32_precision = "tf32"
    assert describe().endswith("fp32 products of precision tf32")
    module.fp32_precision = "none"
    torch.set_float32_matmul_precision("high")
    assert describe().endswith("fp32 products of precision tf32")
    torch.set_float32_matmul_precision("highest")
    assert describe() == plain


def test_exchange_refuses_damaged_messages() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params)
        made.exchange()

        def damage(message: Tensor) -> Tensor:
            changed = message.clone()
            changed[40] ^= 16
            return changed

        if replicas.rank == 1:
            replicas.on_its_way = damage
        made.exchange()

    with pytest.raises(PayloadError, match="rank 1 was damaged"):
        together(2, work)


def test_sync_every_accumulates_between_exchanges() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, sync_every=3, decay=0.5, dense="fp32")
        for step in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            assert made.exchange() == (step == 2)
            assert (params[0].grad is None) == (step < 2)
            if step == 1:
                assert made.state[params[0]]["residual"].unique().tolist() == [1.5]
        assert params[-1].grad.unique().tolist() == [0.0, 3.0]  # of an embedding, a part is sent
        residual = made.state[params[-1]]["residual"]
        assert torch.equal(residual + params[-1].grad, torch.full_like(residual, 3.0)), "gradients do not decay"

    together(2, work)


def test_exchange_with_missing_gradients_and_empty_parameters() -> None:
    params = [nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(0, 64)), nn.Parameter(torch.ones(3))]
    made = MomentumExchange(params)
    params[0].grad = torch.ones(64, 64)
    made.exchange()
    assert params[0].grad.abs().sum() > 0
    assert params[1].grad.shape == (0, 64)
    assert not params[2].grad.any()


def test_half_precision_parameters_have_fp32_residuals() -> None:
    param = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    made = MomentumExchange([param], topk=4, decay=0.999)
    param.grad = torch.randn(64, 64, dtype=torch.bfloat16)
    made.exchange()
    before = made.state[param]["residual"].clone()
    assert before.dtype == torch.float32
    assert param.grad.dtype == torch.bfloat16
    param.grad = torch.zeros_like(param)
    made.exchange()
    assert (made.state[param]["residual"] != before).any()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunk": 0}, "chunk must be an integer from 1 to 4096; given 0"),
        ({"topk": 17, "chunk": 4}, "topk must be at most chunk^2 = 16, the size of a block; given 17"),
        ({"decay": 1.5}, "decay must be from 0 to 1; given 1.5"),
        ({"values": "int2"}, "values must be one of fp32, bf16, int8, int4, sign; given 'int2'"),
        ({"exchange": "ring"}, "exchange must be one of auto, all_gather, owner, dense; given 'ring'"),
        ({"sync_every": 0}, "sync_every must be an integer of at least 1; given 0"),
        ({"check_every": 0}, "check_every must be an integer of at least 1; given 0"),
        ({"process_group": 3}, "process_group must be a process group or a mesh of one dim; given 3"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        MomentumExchange([nn.Parameter(torch.ones(4, 4))], **options)
    assert text in str(error.value)


def test_str_describes_groups_of_a_model() -> None:
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.LayerNorm(128))
    text = str(MomentumExchange(sc.param_groups(model), topk=8))
    assert "2 tensors" not in text.splitlines()[0]
    assert "8 of 64 x 64, sign" in text
    assert "25 of 50 x 64, sign" in text
    assert "rows of 128, bf16" in text
    # 384 vectors in bf16; 16 of 8,192 coefficients, and 50 of 6,400 of the embedding
    assert text.splitlines()[-1] == "message: 89% vectors, 8% embeddings, 3% matrices"
    assert "message" not in str(MomentumExchange([nn.Parameter(torch.ones(4, 4))]))


def test_exchange_stops_when_parameters_differ() -> None:
    def work(replicas: ThreadGroup) -> None:
        params = make_params()
        made = make_exchange(replicas, params, check_every=2)
        for step in range(5):
            if step == 1 and replicas.rank == 1:
                with torch.no_grad():
                    params[3].view(-1)[7] += 1e-4
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape)
            made.exchange()

    with pytest.raises(ReplicaError, match=r"step 3: conv on rank 1 differs from the other ranks"):
        together(3, work)


def test_replica_divergence_and_averaged_residuals() -> None:
    def work(replicas: ThreadGroup) -> tuple[float | None, float | None, list[Tensor]]:
        params = make_params()
        alike, apart = (make_exchange(replicas, make_params(), check_every=1) for _ in range(2))
        for step in range(2):
            for made, rank in ((alike, 0), (apart, replicas.rank)):
                for param in made.param_groups[0]["params"]:
                    param.grad = gradient(rank, step, param.shape)
                made.exchange()
        synced = make_exchange(replicas, params, state_sync_every=2, decay=1.0, topk=1)
        for step in range(3):
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape) if step < 2 else torch.zeros_like(param)
            synced.exchange()
        return alike.replica_divergence, apart.replica_divergence, residuals(synced, params)

    found = together(4, work)
    for alike, apart, _ in found:
        assert alike == 0.0
        assert apart == pytest.approx((3 / 4) ** 0.5, rel=0.2)  # independent residuals: all but a quarter differs
    for _, _, left in found[1:]:
        for one, other in zip(left, found[0][2], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(4, 40, 1), (1, 8, 3), (200,), (7,), (), (3, 5, 2, 2), (50, 96)])
def test_dense_parameters_have_long_rows(shape: tuple[int, ...]) -> None:
    spec, grid = make_spec(shape, 1, {"role": "vector", "matrix_dims": None, "compat": None, **DENSE})
    numel = max(1, torch.Size(shape).numel())
    assert spec.width >= min(numel, 64)
    value = torch.arange(numel, dtype=torch.float32).view(shape)
    assert torch.equal(grid.from_blocks(grid.to_blocks(value)), value)


def test_matrix_dims_may_be_lists() -> None:
    group = MomentumExchange([nn.Parameter(torch.ones(64, 80))]).param_groups[0]
    found = [make_spec((64, 80), 5120, {**group, "matrix_dims": dims}) for dims in ([[1], [0]], ((1,), (0,)))]
    assert len(set(found)) == 1  # hashable, because they are dictionary keys on a GPU


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("values", get_args(Values))
def test_exchange_is_equal_on_all_devices(device: str, values: str) -> None:
    """Bitwise on one device. Across devices, all coefficients are sent, so near ties cannot change the selection."""

    def exchanged(device: str, topk: int) -> list[Tensor]:
        params = [nn.Parameter(param.detach().to(device)) for param in make_params()]
        made = make_exchange(None, params, topk=topk, values=values, residual="fp32")
        for step in range(3):
            for param in params:
                param.grad = gradient(0, step, param.shape).to(device)
            made.exchange()
        return [param.grad.cpu() for param in params if param.grad is not None]

    for one, again in zip(exchanged(device, 8), exchanged(device, 8), strict=True):
        assert torch.equal(one, again)
    if values == "fp32":  # at lower precision, a coefficient may round to the neighboring code
        for one, other in zip(exchanged("cpu", 256), exchanged(device, 256), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_gradients_have_strides_of_parameters(optimizer: Any) -> None:
    """Fused optimizers assume that a gradient has the memory layout of its parameter."""
    generator = torch.Generator().manual_seed(0)
    transposed = torch.randn(128, 96, generator=generator).t()
    last = torch.randn(32, 16, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    found = []
    for fused in (True, False):
        params = [nn.Parameter(each.clone()) for each in (transposed, last)]
        made, stepping = MomentumExchange(params, topk=8), optimizer(params, lr=1e-3, fused=fused)
        for step in range(3):
            for param in params:
                param.grad = gradient(0, step, param.shape)
            made.exchange()
            assert all(param.grad is not None and param.grad.stride() == param.stride() for param in params)
            stepping.step()
        found.append(params)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{"topk": 8}, {"topk": 200}, {"topk": 8, "overlap": True}], ids=str)
def test_autocast_does_not_change_exchange(options: dict[str, Any]) -> None:
    found = []
    for enabled in (False, True):
        (param,) = params = [nn.Parameter(torch.randn(70, 130, generator=torch.Generator().manual_seed(0)))]
        made = MomentumExchange(params, chunk=16, values="fp32", **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            with made.overlapped():
                (param * gradient(0, 1, param.shape)).sum().backward()
            made.exchange()
        found.append(param.grad)
    assert torch.equal(*found)


def test_flush_keeps_wire_bytes_of_last_step() -> None:
    def work(replicas: ThreadGroup) -> list[int]:
        params, sent = make_params(), []
        made = make_exchange(replicas, params, delay=1, check_every=None)
        for step in range(5):
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape)
            made.exchange()
            sent.append(made.wire_bytes)
            if step == 2:
                made.state_dict()
                assert made.wire_bytes == sent[-1]
        assert sent[2:] == [made.planned_wire_bytes()] * 3
        return sent

    together(2, work)


def test_transfer_state_keeps_pending_result() -> None:
    def work(replicas: ThreadGroup) -> list[int]:
        params = make_params()
        made = make_exchange(replicas, params, delay=1, check_every=None)
        for step in range(3):
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape)
            if replicas.rank == 1 and step == 1:
                params[0].grad[0, 0] = torch.nan
            if step == 2:
                before, made = made, make_exchange(replicas, params, delay=1, check_every=None)
                made.transfer_state(before)
            made.exchange()
        assert made.wire_bytes == made.planned_wire_bytes()
        return made.nonfinite_ranks

    assert together(2, work) == [[1], [1]]


def test_refused_state_keeps_pending_result() -> None:
    def work(replicas: ThreadGroup, refused: bool) -> list[Tensor]:
        params = make_params()
        made = make_exchange(replicas, params, delay=1)
        for step in range(4):
            for param in params:
                param.grad = gradient(replicas.rank, step, param.shape)
            made.exchange()
            if refused and step == 2:
                with pytest.raises(UserError, match="this is rank"):
                    made.load_local_state_dict({**made.local_state_dict(), "rank": 5})
                with pytest.raises(UserError, match="must be a tensor"):
                    made.load_shared_state_dict({"step": 3, "pending": {"param_groups.0.0": 3}})
        return [param.grad for param in params if param.grad is not None]

    found, wanted = (
        together(2, lambda replicas, refused=refused: work(replicas, refused)) for refused in (True, False)
    )
    assert any(grad.any() for grad in wanted[0])
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_block_groups_are_bounded_by_numel() -> None:
    groups = [MomentumExchange([nn.Parameter(torch.empty(64, 64))]).param_groups[0]] * 8
    shapes = dict.fromkeys(range(8), (128, 128))
    counts = dict.fromkeys(shapes, 128 * 128)
    for most, wanted in ((2 * 128 * 128, 4), (4 * 128 * 128, 2), (8 * 128 * 128, 1)):
        assert len(make_block_groups(shapes, counts, groups, max_numel=most)) == wanted


@pytest.mark.parametrize("given", [[3], ["abc"], "abc", 3, [{"params": 3}], [("a", "b", "c")]], ids=repr)
def test_exchange_refuses_nonparameters(given: Any) -> None:
    with pytest.raises(UserError, match=r"parameters are (given as a list|tensors)"):
        MomentumExchange(given)


@pytest.mark.parametrize("rows", [32_000, 128_256])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_for_a_real_vocabulary(rows: int, tied: bool) -> None:
    """Of a Llama of 1.35 billion parameters, the defaults send less than a hundredth of 16-bit gradients."""
    shape = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = LlamaConfig(vocab_size=rows, tie_word_embeddings=tied, **shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    numel = sum(param.numel() for param in model.parameters())
    signs = {"values": "sign", "dense": "sign"}
    groups = sc.param_groups(model)
    for made, steps, times in (
        (MomentumExchange(groups, check_every=None), 1, 100),
        (MomentumExchange(groups, check_every=None, topk=8, **signs), 1, 300),
        (outer_exchange("sparseloco", groups, topk=176, **signs), 5, 200),
    ):
        for world in (2, 8):
            assert allreduce_wire_bytes(2 * numel, world) * steps >= times * made.planned_wire_bytes(world)


def test_embedding_sends_its_largest_elements() -> None:
    """Without a transform and without decay; its gradients, not their momentum."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    made = MomentumExchange(sc.param_groups(model), topk=1, decay=0.5, values="fp32")  # 4 of the embedding
    assert made.are_matrices() == [param is model[1].weight for param in made.residuals.params]
    rare = torch.zeros(64, 64)
    rare[5, :8] = torch.arange(8.0, 0.0, -1.0)
    model[0].weight.grad = rare
    made.exchange()
    assert torch.equal(model[0].weight.grad, rare.where(rare >= 5.0, 0.0))
    model[0].weight.grad = None
    made.exchange()
    assert torch.equal(model[0].weight.grad, rare.where(rare < 5.0, 0.0)), "a step later, without decay"


def test_role_vector_sends_an_embedding_in_full() -> None:
    model = nn.Sequential(nn.Embedding(64, 64))
    (group,) = sc.param_groups(model)
    made = MomentumExchange([{**group, "role": "vector"}], topk=4, dense="fp32")
    model[0].weight.grad = torch.ones(64, 64)
    made.exchange()
    assert torch.equal(model[0].weight.grad, torch.ones(64, 64))


@pytest.mark.parametrize("update", ["sign", "muon"])
def test_demo_steps_an_embedding_with_adamw(update: Any) -> None:
    model = nn.Sequential(nn.Embedding(64, 64))
    optimizer = sc.DeMo(sc.param_groups(model), lr=1e-3, topk=4, update=update, residual="int8")
    model[0].weight.grad = torch.randn(64, 64)
    optimizer.step()
    assert {"exp_avg", "exp_avg_sq", "residual"} <= optimizer.state[model[0].weight].keys()
    assert optimizer.state[model[0].weight]["residual"].dtype == torch.int8


def test_tt_embedding_and_whole_blocks() -> None:
    """Cores of a TT embedding are sent in full; an embedding of which everything is sent is still divided in blocks."""
    embedding = nn.Sequential(nn.Embedding(4096, 256))
    sc.tensorize(embedding, 32)
    assert max(core.numel() for core in embedding.parameters()) >= 4096
    made = MomentumExchange(sc.param_groups(embedding), topk=4)
    assert all(group.spec.codec.is_dense for group in made._update_layout().block_groups)
    group = {"chunk": 64, "topk": 4096, "values": "sign", "dense": "sign", "transform": "dct", "decay": 0.9}
    options = {**group, "role": "embedding", "compat": None, "matrix_dims": None}
    spec, _ = make_spec((128, 64), 128 * 64, options)
    assert spec.is_sparse
    assert (spec.height, spec.width) == (64, 64)
