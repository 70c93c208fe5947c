"""peft, accelerate and torchao around attention that `inject` replaced: as around the stock model."""

import copy
import itertools

import accelerate
import peft
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from models import build, inputs
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchao import quantization

import quest_core


class Call(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):  # [B, N, 32]
        q, k, v = (part(x).unflatten(-1, (2, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Written(Call):
    def attend(self, q, k, v):
        return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x):
        return self.m(x, x, x, need_weights=False)[0]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.self_attn, self.out = kind(), nn.Linear(32, 32)

    def forward(self, x):
        return self.out(x + self.self_attn(x))


KINDS = {"call": Call, "written": Written, "packed": Packed}
ATTENTIONS = ["standard", "quest", "qknorm-hs", "quest+sigmoid"]
PACKED = ["quest+dgqa(kv_heads=1)", "aft-simple"]
X = torch.randn(2, 5, 32)


def net(kind, attention):
    """Return the same model in every call, whose learned scales are not their initial values; with None the host's."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        made = Net(KINDS[kind])
        if attention is not None:
            inject(made, attention)
        for mechanism in (m for m in made.modules() if isinstance(m, quest_core.Mechanism)):
            for parameter in mechanism.parameters():
                nn.init.uniform_(parameter, 0.5, 2)
    return made.eval()


def inject(model, attention):
    """Change a model of `net`; where its parts are wrapped, they are found all the same."""
    packed = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    return quest_core.inject(model, attention, **({} if packed else {"example": X}))


PARTS = {"call": ["q", "k", "v", "o"], "written": ["q", "k", "v", "o"], "packed": ["m"]}
TUNERS = {
    "lora": lambda parts: peft.LoraConfig(target_modules=parts, r=2, init_lora_weights=False),
    "modules_to_save": lambda parts: peft.LoraConfig(target_modules=["out"], r=2, modules_to_save=["self_attn"]),
    "dora": lambda parts: peft.LoraConfig(target_modules=parts, r=2, use_dora=True, init_lora_weights=False),
    "ia3": lambda parts: peft.IA3Config(target_modules=parts, feedforward_modules=[], init_ia3_weights=False),
    "loha": lambda parts: peft.LoHaConfig(target_modules=parts, r=2, init_weights=False),
    "oft": lambda parts: peft.OFTConfig(target_modules=parts, oft_block_size=4, init_weights=False),
    "adalora": lambda parts: peft.AdaLoraConfig(
        target_modules=parts, init_r=2, target_r=1, total_step=5, tinit=1, tfinal=1, init_lora_weights=False
    ),
}
MULTIPLY = {"oft", "adalora"}  # made weights in the forward, which a written-out site takes for its own
PAIRS = list(itertools.product(KINDS, TUNERS))
REFUSED = [("packed", tuner) for tuner in TUNERS if tuner not in ("lora", "modules_to_save")]  # by peft
TUNED = [pair for pair in PAIRS if pair not in REFUSED]


@pytest.mark.parametrize(("kind", "tuner"), PAIRS)
def test_adapters_train_load_and_merge(kind, tuner, tmp_path):
    attention = "qknorm-hs"  # unit keys, and a parameter
    config = TUNERS[tuner](PARTS[kind])
    if (kind, tuner) in REFUSED:
        with pytest.raises((ValueError, TypeError)):  # as for the stock module
            peft.get_peft_model(net(kind, attention), config)
        return
    tuned = peft.get_peft_model(net(kind, attention), config).eval()
    if kind == "written" and tuner in MULTIPLY:
        with pytest.raises(quest_core.UnsupportedError, match="forms the product"):
            tuned(X)
        return
    tuned(X).square().sum().backward()
    learned = [p for p in tuned.parameters() if p.requires_grad]
    assert learned
    assert all(p.grad is not None for p in learned)
    with torch.no_grad():
        for parameter in learned:
            parameter.add_(0.1)
    want = tuned(X)
    assert not torch.allclose(want, net(kind, attention)(X))
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(net(kind, attention), tmp_path).eval()
    torch.testing.assert_close(again(X), want, rtol=1e-5, atol=1e-5)
    with tuned.disable_adapter():
        torch.testing.assert_close(tuned(X), net(kind, attention)(X))
    close = {"rtol": 1e-2, "atol": 1e-2} if tuner == "adalora" else {"rtol": 1e-4, "atol": 1e-4}
    tuned.merge_adapter()
    torch.testing.assert_close(tuned(X), want, **close)
    tuned.unmerge_adapter()
    torch.testing.assert_close(tuned(X), want, **close)
    torch.testing.assert_close(tuned.merge_and_unload()(X), want, **close)
    if tuner != "modules_to_save":  # peft puts in what it has trained
        torch.testing.assert_close(again.unload()(X), net(kind, attention)(X))


@pytest.mark.parametrize(("kind", "tuner"), TUNED)
def test_an_adapter_on_standard_attention_is_the_one_on_the_host(kind, tuner):
    """Also what peft does with a whole nn.MultiheadAttention, such as how it merges out_proj: peft#3774."""
    made = []
    for attention in (None, "standard"):
        torch.manual_seed(1)
        tuned = peft.get_peft_model(net(kind, attention), TUNERS[tuner](PARTS[kind])).eval()
        out = tuned(X)
        out.square().sum().backward()
        grads = [p.grad for p in tuned.parameters() if p.requires_grad]
        made.append([out, *grads, tuned.merge_and_unload()(X)])
    for one, two in zip(*made, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_save_different_modules_load_beside_each_other(kind, tmp_path):
    """peft#2422: a second adapter with other modules_to_save did not load."""
    attention, want = "qknorm-hs", {}
    for name, modules in {"one": ["self_attn"], "two": None}.items():
        config = peft.LoraConfig(target_modules=["out"], r=2, modules_to_save=modules, init_lora_weights=False)
        tuned = peft.get_peft_model(net(kind, attention), config, adapter_name=name).eval()
        with torch.no_grad():
            for parameter in (p for p in tuned.parameters() if p.requires_grad):
                parameter.add_(0.1)
        want[name] = tuned(X)
        tuned.save_pretrained(tmp_path)
    order = ["two", "one"]  # the modules that the second saves are wrapped after the first adapter
    again = peft.PeftModel.from_pretrained(net(kind, attention), tmp_path / order[0], adapter_name=order[0])
    again.load_adapter(tmp_path / order[1], adapter_name=order[1])
    for name in order:
        again.set_adapter(name)
        torch.testing.assert_close(again.eval()(X), want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "tuner"), TUNED)
def test_attention_is_replaced_around_adapters_or_refused(kind, tuner):
    tuned = peft.get_peft_model(net(kind, None), TUNERS[tuner](PARTS[kind])).eval()
    other = copy.deepcopy(tuned)
    want = tuned(X)
    try:
        inject(tuned, "quest")
        found = tuned(X)
    except quest_core.QuestError:
        assert kind == "written" or (kind, tuner) == ("call", "modules_to_save")
        return
    plain = other.merge_and_unload() if tuner != "adalora" else None
    inject(other, "standard")
    torch.testing.assert_close(other(X), want, rtol=1e-4, atol=1e-4)
    if plain is not None:
        inject(plain, "quest")
        torch.testing.assert_close(found, plain(X), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("config", [peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig])
def test_virtual_tokens_train_and_load(config, tmp_path):
    base, again = (build("llama", attention="qknorm").eval() for _ in range(2))
    arguments = inputs("llama")
    tuned = peft.get_peft_model(base, config(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    tuned(**arguments).logits.square().sum().backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)
    want = tuned(**arguments).logits
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    torch.testing.assert_close(again(**arguments).logits, want)


def offload(model, folder, buffers=True):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=buffers)
    return model


def offload_weights(model, folder):
    return offload(model, folder, buffers=False)


def disk(model, folder):
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"), offload_buffers=True)
    return model


def dispatch(model, folder):
    places = {"self_attn": "disk", "out": "cpu"}
    options = {"main_device": "cpu", "offload_dir": folder, "offload_buffers": True, "force_hooks": True}
    return accelerate.dispatch_model(model, places, **options)


def empty(model, folder):
    accelerate.Accelerator(cpu=True).save_model(model, folder)
    made = copy.deepcopy(model).to("meta")
    return accelerate.load_checkpoint_and_dispatch(made, folder, device_map={"": "cpu"})


def from_disk(model, folder):
    """accelerate leaves the buffers of a module on disk where they are, and refuses those on the meta device."""
    accelerate.Accelerator(cpu=True).save_model(model, folder)
    made, places = copy.deepcopy(model).to("meta"), {"self_attn": "disk", "out": "cpu"}
    return accelerate.load_checkpoint_and_dispatch(made, folder, places, offload_folder=folder / "disk")


def prepare(model, folder):
    return accelerate.Accelerator(cpu=True).prepare(model)


def resume(model, folder):
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(model)
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    return model


def in_bfloat16(model, folder):
    AcceleratorState._reset_state()
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)


WRAPS = [offload, offload_weights, disk, dispatch, empty, from_disk, prepare, resume, in_bfloat16]


@pytest.fixture(autouse=True)
def _forget_the_accelerator():
    yield
    AcceleratorState._reset_state()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_offloading_gives_the_same_output(kind, wrap, tmp_path):
    more = PACKED if kind == "packed" and wrap is not from_disk else []  # dgqa has a buffer
    for attention in [*ATTENTIONS, *more]:
        model = net(kind, attention)
        found = wrap(copy.deepcopy(model), tmp_path / attention)(X)
        limit = 0.05 if wrap is in_bfloat16 else 1e-5
        torch.testing.assert_close(
            found, model(X), rtol=limit, atol=limit, msg=lambda text, a=attention: f"{a}: {text}"
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [offload, disk, dispatch, prepare])
def test_attention_is_replaced_in_an_offloaded_model_or_refused(kind, wrap, tmp_path):
    model = wrap(net(kind, None), tmp_path)
    want = model(X) if kind != "packed" else None  # accelerate#3941: the host reads out_proj without calling it
    if wrap is dispatch or (kind == "packed" and wrap is not prepare):  # it has replaced the forward of the module
        with pytest.raises(quest_core.InjectionError, match="inject before"):
            inject(model, "quest")
        assert want is None or model(X).equal(want)
        return
    inject(model, "quest")
    torch.testing.assert_close(model(X), net(kind, "quest")(X), rtol=1e-5, atol=1e-5)


INTS = {
    "int8 weights": quantization.Int8WeightOnlyConfig,
    "int8 weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
    "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(16)),
    "float8": quantization.Float8WeightOnlyConfig,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INTS)
def test_weights_that_torchao_quantized(name, kind):
    stock = net(kind, None)
    quantization.quantize_(stock, INTS[name]())
    for attention in ATTENTIONS:
        model = net(kind, attention)
        want = model(X)
        quantization.quantize_(model, INTS[name]())
        found = model(X)
        assert 0 < (found - want).abs().max() < (0.6 if name == "int4" else 0.2), attention
        assert copy.deepcopy(model)(X).equal(found), attention
        late = copy.deepcopy(stock)
        inject(late, attention)
        late.load_state_dict(model.state_dict(), assign=True)
        torch.testing.assert_close(late(X), found)


@pytest.mark.parametrize("name", INTS)
def test_weights_that_torchao_quantized_are_not_changed(name):
    arguments = inputs("llama")
    model = build("llama").eval()
    quantization.quantize_(model, INTS[name]())
    want = model(**arguments).logits
    for attention, options in (("quest+mqa", {}), ("quest(init=5)", {"fresh": True})):
        with pytest.raises(quest_core.UnsupportedError, match=r"parametrized|cannot be set"):
            quest_core.inject(model, attention, **options)
    with pytest.raises(quest_core.UnsupportedError):
        quest_core.calibrate(model, [arguments])
    assert model(**arguments).logits.equal(want)
    quest_core.inject(model, "standard")
    torch.testing.assert_close(model(**arguments).logits, want)


@pytest.fixture
def mesh(tmp_path):
    """A mesh of one process on a CPU."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("attention", ["quest", "qknorm", "qknorm-hs"])
def test_a_model_from_the_meta_device_is_initialized_whole(attention, sharded, mesh):
    """Each learned scale must have its initial value, not what `to_empty` left; what was initialized stays."""
    with torch.device("meta"):
        model = build("llama", attention=attention)
    if sharded:
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    learned = {name: p for name, p in model.named_parameters() if ".mechanism." in name}
    assert bool(learned) == (attention != "quest")
    for change in (torch.nan, 0.3):
        for parameter in learned.values():
            nn.init.constant_(parameter, change)
        model.init_weights()
        state = build("llama", attention=attention).state_dict()
        for name, found in learned.items():
            found = found.full_tensor() if sharded else found
            torch.testing.assert_close(found, state[name] if change != 0.3 else torch.full_like(found, 0.3))


def test_heads_that_tensor_parallelism_has_divided_take_what_needs_no_others(mesh):
    """A scale that all heads share would get another gradient on each rank, and ALiBi the slopes of other heads."""
    arguments, plan = inputs("llama"), {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel()}
    model = build("llama").eval()
    want = copy.deepcopy(model)
    want.set_attn_implementation("quest")
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, plan)
    for attention in ("qknorm-ds", "qknorm", "quest+dgqa(kv_heads=2)"):
        with pytest.raises(quest_core.UnsupportedError, match="divided among ranks"):
            model.set_attn_implementation(attention)
    model.set_attn_implementation("quest")
    torch.testing.assert_close(model(**arguments).logits, want(**arguments).logits)
