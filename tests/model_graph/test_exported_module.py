"""Models of `transformers`, which torch.fx cannot follow, as modules that it can: equal bits, cut between layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from socflower.model_graph.chain import capture_chain
from socflower.model_graph.exported_module import exported_module
from tests.model_graph.test_chain import forward, gradients_of, run
from tests.one_line import refused
from tests.seeded import built

transformers = pytest.importorskip("transformers", reason="pip install 'socflower[transformers]'")


class Classifier(nn.Module):
    """BERT on padded sentences; the mask follows from the tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=24,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.model = transformers.BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits
        return found


class Writer(nn.Module):
    """GPT-2 whose head has weights of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=50,
            n_positions=24,
            n_embd=16,
            n_layer=3,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            **{"tie_word_embeddings": False, **settings},
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found


def undropped() -> Writer:
    return Writer(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def tokens(num_samples: int, length: int) -> Tensor:
    """Return sentences, the later ones padded with zeros at their ends."""
    generator = torch.Generator().manual_seed(num_samples + 10 * length)
    found = torch.randint(1, 50, (num_samples, length), generator=generator)
    for at in range(num_samples):
        found[at, length - at % length :] = 0 if at % length else found[at, length:]
    return found


@pytest.mark.parametrize(
    "make",
    [lambda: Classifier(0.2), pytest.param(Writer, marks=pytest.mark.slow)],
    ids=["bert", "gpt-2"],
)
def test_any_batch_gives_the_models_bits_in_training_and_evaluation(make: Any) -> None:
    model = built(make, 1)
    found = exported_module(model, tokens(4, 8), free={1: 24})
    own = dict(model.named_parameters())
    assert all(own[name] is parameter for name, parameter in found.named_parameters())
    assert {id(each) for each in found.parameters()} == {id(each) for each in model.parameters()}
    for training in (True, False):
        for batch in (tokens(4, 8), tokens(3, 5), tokens(1, 11)):
            made = []
            for each in (model.train(training), found.train(training)):
                torch.manual_seed(3)
                made.append(each(batch))
            assert torch.equal(*made)


@pytest.mark.parametrize(
    "make", [pytest.param(Classifier, marks=pytest.mark.slow), undropped], ids=["bert", "gpt-2"]
)
def test_pieces_equal_the_model_and_its_gradients_bit_for_bit(make: Any) -> None:
    model, batch = built(make, 2), tokens(4, 8)
    module = exported_module(model, batch)
    output = model(batch)
    output.backward(torch.ones_like(output))
    whole = gradients_of(module)
    module.zero_grad()
    chain = capture_chain(module, batch, name="whole")
    # Before and behind each of three layers at least.
    num_pieces = len(chain.pieces)
    assert num_pieces > 7
    piecewise, gradients = run(chain, module, batch)
    assert torch.equal(piecewise, output)
    assert gradients.keys() == whole.keys()
    assert all(torch.equal(gradients[key], whole[key]) for key in whole)
    assert torch.equal(forward(chain, module, tokens(2, 8)), model(tokens(2, 8)))


def test_what_cannot_be_exported_is_refused() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x

    batch = torch.ones(4, 3)
    refused(lambda: capture_chain(built(Classifier, 1).model, tokens(2, 8)), "exported_module")
    refused(lambda: exported_module(Branching(), batch), "exported_module", "Branching")
    refused(lambda: exported_module(Two(), batch), "Two", "2 values")
    refused(lambda: exported_module(nn.BatchNorm1d(3), batch), "exported_module", "BatchNorm")
    refused(lambda: exported_module(nn.Linear(3, 3), batch[:1]), "two samples")
