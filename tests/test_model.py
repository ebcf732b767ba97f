# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The model itself: its formulas, its outputs, its switches."""

import math

import pytest
import torch
import torch.nn.functional as F
from atma import AtmaForCausalLM
from atma.modeling_atma import soft_cap


def test_the_soft_cap_is_algebraic():
    x = torch.tensor([-1e4, -15.0, 0.0, 3.0, 1e6], dtype=torch.float64)
    close = torch.tensor([-15.0, -15 / math.sqrt(2), 0.0, 3 / math.sqrt(1.04), 15.0])
    assert torch.allclose(soft_cap(x, 15.0), close.double(), atol=1e-4)
    assert soft_cap(x.bfloat16(), 15.0).dtype == torch.bfloat16


def naive_forward(model: AtmaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """
    ATMA written a second time for one row, token by token, from the equations alone: nothing of the
    kernels, the cache or the layout is used.
    """
    config = model.config
    heads, groups, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x, weight, eps):
        return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)

    def plain_norm(x):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 2.0**-23)

    def conv(x, taps):
        width = taps.shape[1]
        past = [
            [x[t - i] * taps[:, width - 1 - i] for i in range(min(t + 1, width))]
            for t in range(len(x))
        ]
        return torch.stack([sum(terms) for terms in past])

    x = model.model.embed_tokens.weight[ids]
    for layer in model.model.layers:
        h = norm(x, layer.input_norm.weight, config.rms_norm_eps)
        mixer = layer.mixer
        if not layer.is_hybrid:
            b, c, v = mixer.in_proj(h).chunk(3, -1)
            mixed = mixer.out_proj(c * conv(b * v, mixer.conv_weight))
        else:
            q = plain_norm(mixer.q_proj(h).view(-1, heads, D)).flatten(1)
            k = plain_norm(mixer.k_proj(h).view(-1, groups, D)).flatten(1)
            v = mixer.v_proj(h)
            q, k, v = (
                y + conv(y, taps)
                for y, taps in (
                    (q, mixer.query_canon_weight),
                    (k, mixer.key_canon_weight),
                    (v, mixer.value_canon_weight),
                )
            )
            q = q.view(-1, heads, D)
            k = k.view(-1, groups, D).repeat_interleave(heads // groups, 1)
            v = v.view(-1, groups, D).repeat_interleave(heads // groups, 1)
            content, counts, reads = [], [], []
            memory = torch.zeros(heads, D, D, dtype=x.dtype)
            m = mixer.memory
            gamma = torch.sigmoid(m.retention_proj(h) + config.memory_retention_bias)
            beta = torch.sigmoid(m.write_proj(h) + config.memory_write_bias)
            for t in range(len(ids)):
                n = t + 1
                temp = 1 + F.softplus(mixer.length_gain) * math.log(n)
                null = mixer.null_base + F.softplus(mixer.null_slope) * math.sqrt(math.log(n + 1))
                sigma = torch.einsum("hd,nhd->hn", q[t], k[:n]) / math.sqrt(D)
                a = torch.cat([temp[:, None] * sigma, (temp * null)[:, None]], 1)
                w = a.softmax(1)
                s = torch.einsum("hn,nhd->hd", w[:, :-1], v[:n]) + w[:, -1:] * mixer.null_value
                content.append(s / s.norm(dim=1, keepdim=True).clamp(min=1e-6))
                p = w[:, :-1] / w[:, :-1].sum(1, keepdim=True)
                n_eff = 1 / p.square().sum(1)
                m_eff = n_eff * (1 - w[:, -1])
                counts.append(torch.tanh(F.softplus(mixer.magnitude_gain) * torch.log1p(m_eff)))
                unit_k, unit_q = F.normalize(k[t], dim=1), F.normalize(q[t], dim=1)
                memory = gamma[t, :, None, None] * memory
                u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", memory, unit_k))
                memory = memory + u[:, :, None] * unit_k[:, None, :]
                reads.append(torch.einsum("hvk,hk->hv", memory, unit_q))
            content = torch.stack(content).flatten(1) * torch.sigmoid(mixer.gate_proj(h))
            reads = plain_norm(torch.stack(reads)).flatten(1) * torch.sigmoid(m.gate_proj(h))
            mixed = (
                mixer.o_proj(content) + mixer.count_proj(torch.stack(counts)) + m.out_proj(reads)
            )
        x = x + mixed
        h = norm(x, layer.post_norm.weight, config.rms_norm_eps)
        mlp = layer.mlp
        x = x + mlp.down_proj(F.relu(mlp.gate_proj(h)).square() * mlp.up_proj(h))
    logits = model.lm_head(norm(x, model.model.norm.weight, config.rms_norm_eps))
    return 15 * logits / torch.sqrt(logits.square() + 15**2)


def test_the_model_is_the_equations_of_the_paper(make_model, tokens):
    model = make_model(dtype=torch.float64)
    ids = tokens(1, 14)
    with torch.no_grad():
        found, expected = model(ids, use_cache=False).logits[0], naive_forward(model, ids[0])
    assert (found - expected).abs().max() < 1e-9


@pytest.mark.smoke
def test_outputs_have_the_usual_entries(make_model, tokens):
    model = make_model()
    model.set_attn_implementation("eager")
    output = model(tokens(2, 9), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 6
    assert all(x.shape == (2, 9, 64) for x in output.hidden_states)
    assert [x.shape for x in output.attentions] == [(2, 4, 9, 9)] * 2
    as_tuple = model(tokens(2, 9), return_dict=False)
    assert torch.allclose(as_tuple[0], output.logits, atol=1e-5)
    assert model(tokens(2, 9), use_cache=False).cache is None


@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
@pytest.mark.parametrize("case", ["plain", "padded", "packed", "cached", "padded-cached"])
def test_attention_weights_fit_the_callers_columns(make_model, tokens, close, core, case):
    """Causal, 0 at padding and across documents, and equal to those of the row alone."""
    model = make_model(attention_type=core)
    ids = tokens(2, 9)
    kwargs = {"output_attentions": True}
    with torch.no_grad():
        alone = [model(ids[i : i + 1], **kwargs).attentions for i in range(2)]
        if case == "plain":
            for i in range(2):
                close(model(ids, **kwargs).attentions[0][i], alone[i][0][0], 1e-5)
            if core != "polar":
                close(alone[0][0].sum(-1), torch.ones(1, 4, 9), 1e-5)
            else:
                assert (alone[0][0].sum(-1) < 1).all()
        elif case == "padded":
            wide = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
            mask = torch.ones_like(wide)
            mask[0, :3] = 0
            mask[1, :3] = 0
            found = model(wide, attention_mask=mask, **kwargs).attentions
            close(found[1][0][:, 3:, 3:], alone[0][1][0], 1e-5)
            assert not found[1][:, :, 3:, :3].any()
        elif case == "packed":
            both = ids.view(1, 18)
            position_ids = torch.arange(9).repeat(2)[None]
            found = model(both, position_ids=position_ids, **kwargs).attentions[1][0]
            close(found[:, :9, :9], alone[0][1][0], 1e-5)
            close(found[:, 9:, 9:], alone[1][1][0], 1e-5)
            assert not found[:, 9:, :9].any()
        elif case == "cached":
            cache = model(ids[:, :6]).cache
            found = model(ids[:, 6:], cache=cache, **kwargs).attentions[1]
            assert found.shape == (2, 4, 3, 9)
            close(found[0], alone[0][1][0][:, 6:], 1e-5)
        else:
            wide = torch.cat([torch.zeros(2, 2, dtype=torch.long), ids], 1)
            mask = torch.ones_like(wide)
            mask[:, :2] = 0
            cache = model(wide[:, :8], attention_mask=mask[:, :8]).cache
            found = model(wide[:, 8:], attention_mask=mask, cache=cache, **kwargs).attentions[1]
            assert found.shape == (2, 4, 3, 11) and not found[..., 9:].any()
            close(found[0][..., :9], alone[0][1][0][:, 6:], 1e-5)


def test_diagnostics_report_the_three_streams(make_model, tokens, close):
    model = make_model()
    ids = tokens(2, 12)
    with torch.no_grad():
        whole = model(ids, output_diagnostics=True)
        assert len(whole.diagnostics) == 2
        report = whole.diagnostics[0]
        assert report.n_eff.shape == report.magnitude.shape == report.half_life.shape == (2, 12, 4)
        count = torch.arange(1, 13)[:, None]
        assert ((report.n_eff >= 1 - 1e-4) & (report.n_eff <= count + 1e-3)).all()
        assert ((report.magnitude >= 0) & (report.magnitude < 1)).all()
        assert ((report.null_weight > 0) & (report.null_weight < 1)).all()
        assert (report.half_life > 0).all() and report.memory_norm.shape == (2, 4)
        cache = model(ids[:, :7]).cache
        rest = model(ids[:, 7:], cache=cache, output_diagnostics=True).diagnostics[0]
        mask = torch.ones(2, 15, dtype=torch.long)
        mask[:, :3] = 0
        wide = torch.cat([ids[:, :3], ids], 1)
        padded = model(wide, attention_mask=mask, output_diagnostics=True).diagnostics[0]
        for name in ("n_eff", "magnitude", "null_weight", "half_life"):
            close(getattr(rest, name), getattr(report, name)[:, 7:], 2e-3)
            close(getattr(padded, name)[:, 3:], getattr(report, name), 2e-3)
        close(rest.memory_norm, report.memory_norm, 1e-4)
    assert model(ids).diagnostics is None


def test_the_half_life_cap_holds(make_model, tokens):
    model = make_model(memory_max_half_life=5.0)
    report = model(tokens(1, 20), output_diagnostics=True).diagnostics
    assert all((layer.half_life <= 5.0 + 1e-4).all() for layer in report)
    free = make_model()(tokens(1, 20), output_diagnostics=True).diagnostics
    assert any((layer.half_life > 5.0).any() for layer in free)


def test_switches_change_the_parameters(make_model):
    names = {name for name, _ in make_model(use_memory=False).named_parameters()}
    assert not any("memory" in name for name in names)
    rope = {name for name, _ in make_model(attention_type="rope").named_parameters()}
    assert not any("canon" in name or "null" in name or "count" in name for name in rope)
    bare = make_model(use_bias=False)
    assert not any(name.endswith("bias") for name, _ in bare.named_parameters())
    bare(torch.ones(1, 3, dtype=torch.long))


def test_logits_to_keep_takes_every_form(model, tokens):
    ids = tokens(2, 11)
    with torch.no_grad():
        full = model(ids).logits
        assert torch.equal(model(ids, logits_to_keep=0).logits, full)
        assert torch.allclose(model(ids, logits_to_keep=3).logits, full[:, -3:], atol=1e-6)
        picked = torch.tensor([1, 5, 6])
        assert torch.allclose(model(ids, logits_to_keep=picked).logits, full[:, picked], atol=1e-6)
        each = torch.tensor([[0, 4], [7, 10]])
        expected = torch.stack([full[0, each[0]], full[1, each[1]]])
        assert torch.allclose(model(ids, logits_to_keep=each).logits, expected, atol=1e-6)
        mask = torch.zeros(2, 11, dtype=torch.bool)
        mask[0, 2] = mask[1, 3] = mask[1, 9] = True
        assert torch.allclose(model(ids, logits_to_keep=mask).logits, full[mask], atol=1e-6)


def test_bf16_evaluation_holds_no_fp32_copy_of_all_logits(make_model, tokens):
    from torch.utils._python_dispatch import TorchDispatchMode

    model = make_model(dtype=torch.bfloat16)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (101,):
                if out.dtype == torch.float32:
                    largest = max(largest, out.numel())
            return out

    ids = tokens(3, 3000)
    with torch.no_grad(), Watch():
        logits = model(ids, use_cache=False).logits
    assert logits.dtype == torch.bfloat16 and largest <= 4096 * 101 < logits.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_follows_fp32_in_every_batching(make_model, tokens, dtype):
    model, low = make_model(), make_model(dtype=dtype)
    ids = tokens(2, 40)
    with torch.no_grad():
        expected = low(ids, use_cache=False).logits.float()
        exact = model(ids, use_cache=False).logits
        assert (expected - exact).norm() <= 0.1 * exact.norm()
        cache = low(ids[:, :20]).cache
        assert cache.layers[1].memory_state.dtype == torch.float32
        steps = [low(ids[:, i : i + 1], cache=cache).logits for i in range(20, 40)]
        found = torch.cat(steps, 1).float()
    assert (found - expected[:, 20:]).norm() <= 4e-2 * expected[:, 20:].norm()


def test_sixteen_thousand_tokens_are_read_on_a_cpu(make_model, tokens, close):
    """In one go and in chunks through the cache; the tail agrees with a different chunking."""
    model = make_model(layer_types=["conv", "hybrid"])
    ids = tokens(1, 16384)
    with torch.no_grad():
        whole = model(ids, use_cache=True, logits_to_keep=4)
        cache = None
        for part in ids.split(6000, dim=1):
            output = model(part, cache=cache, use_cache=True, logits_to_keep=4)
            cache = output.cache
    close(output.logits, whole.logits, 2e-3)


def test_no_module_keeps_a_tensor_besides_its_parameters(model):
    assert not list(model.named_buffers())
