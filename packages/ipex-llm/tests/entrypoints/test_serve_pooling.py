# SPDX-License-Identifier: Apache-2.0
"""Vectors, scores and tokens from the server, on tiny models with seeded weights."""

from __future__ import annotations

import asyncio
import base64
import json
import struct

import pytest
import torch

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
transformers = pytest.importorskip("transformers")

from small_llama import llama  # noqa: E402

import ipex_llm  # noqa: E402
from ipex_core.optimization import optimize  # noqa: E402
from ipex_llm.engine import Engine, PoolingParams, SamplingParams  # noqa: E402
from ipex_llm.engine.encoder import EncoderEngine  # noqa: E402
from ipex_llm.entrypoints.openai.pooling import SIDES  # noqa: E402
from ipex_llm.entrypoints.openai.server import Settings, create_app  # noqa: E402
from ipex_llm.entrypoints.openai.worker import Worker  # noqa: E402
from ipex_llm.model_loader.make import make_tokenizer  # noqa: E402
from ipex_llm.model_loader.pooling import PoolingConfig, encoder_class, read_pooling  # noqa: E402

TEXTS = ["The sea and the moon", "fox", "What is the capital of France? The capital is Paris."]
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
}
PATHS = {
    "bert": ("BertConfig", "BertModel", {}),
    "roberta": ("RobertaConfig", "RobertaModel", {}),
    "modernbert": ("ModernBertConfig", "ModernBertModel", {"local_attention": 8}),
    "mpnet": ("MPNetConfig", "MPNetModel", {}),  # its biases depend on places: no packing
}


def make(config, kind, more=None, **changes):
    torch.manual_seed(0)
    options = {"bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1}
    options |= SHAPE | (more or {}) | changes
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    for parameter in model.parameters():  # so that states differ by more than rounding
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Serve:
    def __init__(self, engine, config=None, max_queue=8, **settings):
        self.worker = Worker(engine, max_queue)
        settings = {"name": "toy", "pooling": config or PoolingConfig(), **settings}
        self.app = create_app(self.worker, Settings(**settings))

    def __call__(self, function):
        async def main():
            async with self.app.router.lifespan_context(self.app):
                transport = httpx.ASGITransport(self.app)
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    await function(client)

        asyncio.run(asyncio.wait_for(main(), 60))


@torch.inference_mode()
def states(model, tokens):
    base = getattr(model, "model", model)
    return base(input_ids=torch.tensor([tokens])).last_hidden_state[0]


def unit(vector):
    return vector / vector.norm()


@pytest.mark.parametrize("family", PATHS)
def test_texts_of_unlike_length_in_one_row(family):
    config, kind, more = PATHS[family]
    model = make(config, kind, more)
    engine = EncoderEngine(optimize(model, dtype=torch.float32), max_num_seqs=4)
    assert engine.packed == (family != "mpnet")
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 512, (n,), generator=draw).tolist() for n in (2, 30, 7, 7, 1)]
    kinds = ("mean", "first", "last", "mean", "last")
    names = [
        engine.add_request(text, PoolingParams(pooling))
        for text, pooling in zip(texts, kinds, strict=True)
    ]
    found = {}
    while engine.has_work:
        found |= {output.request_id: output.vector for output in engine.step()}
    for name, text, pooling in zip(names, texts, kinds, strict=True):
        rows = states(model, text)
        expected = rows.mean(0) if pooling == "mean" else rows[-1 if pooling == "last" else 0]
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
    assert engine.stats().steps == (2 if engine.packed else 4)
    assert engine.stats().finished == 5


def test_the_encoder_refuses_and_cancels():
    engine = EncoderEngine(make("BertConfig", "BertModel"))
    for tokens, params, message in (
        ([], PoolingParams(), "at least one token"),
        ([512], PoolingParams(), "ids in"),
        ([3] * 65, PoolingParams(), "fewer than 65 tokens"),
        ([3], SamplingParams(), "PoolingParams for an encoder"),
        ([3], PoolingParams(token_types=(0, 1)), "token_types must"),
        ([3], PoolingParams(token_types=(2,)), "token_types must"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add_request(tokens, params)
    with pytest.raises(ValueError, match="pooling must be one of last, first, mean"):
        PoolingParams("max")
    one = engine.add_request([3] * 64, PoolingParams())
    with pytest.raises(ValueError, match="must not be in use"):
        engine.add_request([3], PoolingParams(), request_id=one)
    assert engine.cancel(one) and not engine.cancel(one)
    assert [o.reason for o in engine.step()] == ["cancelled"]


@pytest.fixture(scope="module")
def decoder(tokenizer):
    model = llama(vocab_size=512, max_position_embeddings=128)
    return model, ipex_llm.optimize(model, dtype=torch.float32)


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_a_decoder_gives_vectors_beside_texts(decoder, tokenizer, pooling):
    model, fast = decoder
    engine = Engine(fast, tokenizer, block_size=4, num_blocks=40, max_tokens_per_step=8)
    prompts = [list(range(5, 5 + n)) for n in (3, 20, 1)]
    alone = engine.generate([prompts[0]], SamplingParams(max_new_tokens=6))[0].tokens
    for _ in range(2):  # the second time with shared prefixes, which means cannot use
        names = [engine.add_request(p, PoolingParams(pooling)) for p in prompts]
        text = engine.add_request(prompts[0], SamplingParams(max_new_tokens=6))
        found, tokens = {}, []
        while engine.has_work:
            for output in engine.step():
                found[output.request_id] = output.vector
                tokens += output.tokens if output.request_id == text else ()
        assert tuple(tokens) == alone
        for name, prompt in zip(names, prompts, strict=True):
            rows = states(model, prompt)
            expected = {"last": rows[-1], "mean": rows.mean(0), "first": rows[0]}[pooling]
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
    assert engine.stats().blocks_held == 0


def test_embeddings(tokenizer):
    model = make("BertConfig", "BertModel")
    engine = EncoderEngine(optimize(model, dtype=torch.float32), tokenizer)
    server = Serve(engine, PoolingConfig("mean", normalize=True))

    @server
    async def _(client):
        async def ask(**body):
            response = await client.post("/v1/embeddings", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        found = await ask(input=TEXTS, model="toy")
        assert found["object"] == "list" and found["model"] == "toy"
        assert [d["index"] for d in found["data"]] == [0, 1, 2]
        ids = [tokenizer.encode(text) for text in TEXTS]
        total = sum(map(len, ids))
        assert found["usage"] == {"prompt_tokens": total, "total_tokens": total}
        expected = [unit(states(model, tokens).mean(0)) for tokens in ids]
        for entry, vector in zip(found["data"], expected, strict=True):
            assert entry["object"] == "embedding"
            got = torch.tensor(entry["embedding"])
            torch.testing.assert_close(got, vector, rtol=1e-3, atol=1e-4)
        assert (await ask(input=ids))["data"] == found["data"]
        assert (await ask(input=TEXTS[1]))["data"][0]["embedding"] == pytest.approx(
            found["data"][1]["embedding"], rel=1e-4, abs=1e-5
        )
        coded = (await ask(input=ids[0], encoding_format="base64"))["data"][0]["embedding"]
        numbers = struct.unpack("<32f", base64.b64decode(coded))
        assert numbers == pytest.approx(found["data"][0]["embedding"], rel=1e-4, abs=1e-5)
        short = (await ask(input=TEXTS[0], dimensions=5))["data"][0]["embedding"]
        torch.testing.assert_close(torch.tensor(short), unit(expected[0][:5]), rtol=1e-3, atol=1e-4)
        for name in ("normalize", "use_activation"):
            long = (await ask(input=ids[0], **{name: False}))["data"][0]["embedding"]
            assert unit(torch.tensor(long)).tolist() == pytest.approx(
                expected[0].tolist(), abs=1e-4
            )
            assert torch.tensor(long).norm() == pytest.approx(
                float(states(model, ids[0]).mean(0).norm()), rel=1e-3
            )
        cut = (await ask(input=[3] * 200, truncate_prompt_tokens=9))["usage"]["prompt_tokens"]
        assert cut == 9
        cut = (await ask(input="fox " * 100, truncate_prompt_tokens=-1))["usage"]["prompt_tokens"]
        assert cut == 64
        body = {"input": "fox", "dimensions": 33}
        error = (await client.post("/v1/embeddings", json=body)).json()["error"]
        assert error["param"] == "dimensions" and "at most 32" in error["message"]
        many = await ask(input=[f"fox {n}" for n in range(300)])
        assert [d["index"] for d in many["data"]] == list(range(300))


def test_an_encoder_writes_no_text(tokenizer):
    server = Serve(EncoderEngine(make("BertConfig", "BertModel"), tokenizer))

    @server
    async def _(client):
        for path, body in (
            ("/v1/completions", {"prompt": "A"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}]}),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert "must be a decoder" in response.json()["error"]["message"]
        assert (await client.get("/metrics")).status_code == 200


def test_scores_of_a_classifier(tokenizer):
    model = make("BertConfig", "BertForSequenceClassification", num_labels=1)
    engine = EncoderEngine(optimize(model, dtype=torch.float32), tokenizer)
    server = Serve(engine)

    def expected(one, two):
        ids = torch.tensor([tokenizer(one, two)["input_ids"]])
        types = torch.tensor([tokenizer(one, two, return_token_type_ids=True)["token_type_ids"]])
        with torch.inference_mode():
            return float(model(ids, token_type_ids=types).logits[0, 0])

    @server
    async def _(client):
        logits = [expected("the fox", text) for text in TEXTS]
        order = sorted(range(3), key=lambda i: -logits[i])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = {"query": "the fox", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
            found = (await client.post(path, json=body)).json()
            assert [r["index"] for r in found["results"]] == order
            for result in found["results"]:
                sigmoid = torch.tensor(logits[result["index"]]).sigmoid()
                assert result["relevance_score"] == pytest.approx(float(sigmoid), abs=1e-4)
                assert result["document"]["text"] == TEXTS[result["index"]]
        body |= {"top_n": 2, "return_documents": False}
        found = (await client.post("/rerank", json=body)).json()["results"]
        assert [sorted(r) for r in found] == [["index", "relevance_score"]] * 2
        found = (await client.post("/rerank", json=body | {"top_n": 0})).json()["results"]
        assert [r["index"] for r in found] == order
        # As TEI has it.
        body = {"query": "the fox", "texts": TEXTS, "raw_scores": True, "return_text": True}
        found = (await client.post("/rerank", json=body)).json()
        assert [r["index"] for r in found] == order
        assert [r["score"] for r in found] == pytest.approx([logits[i] for i in order], abs=1e-3)
        assert [r["text"] for r in found] == [TEXTS[i] for i in order]
        body = {"text_1": "the fox", "text_2": TEXTS}
        found = (await client.post("/v1/score", json=body)).json()["data"]
        sigmoids = torch.tensor(logits).sigmoid().tolist()
        assert [d["score"] for d in found] == pytest.approx(sigmoids, abs=1e-4)
        response = await client.post("/v1/embeddings", json={"input": "A"})
        assert response.status_code == 400 and "got a classifier" in response.text
        body = {"queries": "a" * 3000, "documents": TEXTS}
        response = await client.post("/v1/score", json=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "queries"


def test_scores_of_vectors_are_cosines(decoder, tokenizer):
    model, fast = decoder
    server = Serve(Engine(fast, tokenizer, block_size=4, num_blocks=64, max_num_seqs=4))

    @server
    async def _(client):
        vectors = [unit(states(model, tokenizer.encode(text))[-1]) for text in TEXTS]
        expected = [float(vectors[i] @ vectors[(i + 1) % 3]) for i in range(3)]
        for one, other in SIDES:
            body = {one: TEXTS, other: TEXTS[1:] + TEXTS[:1]}
            found = (await client.post("/score", json=body)).json()["data"]
            assert [d["score"] for d in found] == pytest.approx(expected, abs=1e-3)
        body = {"query": TEXTS[2], "documents": TEXTS}
        found = (await client.post("/rerank", json=body)).json()["results"]
        assert found[0]["index"] == 2 and found[0]["relevance_score"] == pytest.approx(1, abs=1e-4)
        # Texts and vectors from one server, at the same time.
        text = {"prompt": "The sea", "max_tokens": 8, "temperature": 0}
        alone = (await client.post("/v1/completions", json=text)).json()["choices"]
        answers = await asyncio.gather(
            client.post("/v1/completions", json=text),
            client.post("/v1/embeddings", json={"input": TEXTS * 20}),
        )
        assert answers[0].json()["choices"] == alone
        got = torch.tensor(answers[1].json()["data"][1]["embedding"])
        torch.testing.assert_close(got, vectors[1], rtol=1e-3, atol=1e-3)


def test_tokens_and_back(decoder, tokenizer):
    server = Serve(Engine(decoder[1], tokenizer, block_size=4, num_blocks=64))

    @server
    async def _(client):
        found = (await client.post("/tokenize", json={"prompt": TEXTS[0]})).json()
        assert found["tokens"] == tokenizer.encode(TEXTS[0])
        assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 128
        body = {"prompt": TEXTS[0], "add_special_tokens": False, "return_token_strs": True}
        bare = (await client.post("/tokenize", json=body)).json()
        assert bare["tokens"] == found["tokens"][1:]
        assert bare["token_strs"] == tokenizer.convert_ids_to_tokens(bare["tokens"])
        back = (await client.post("/detokenize", json={"tokens": bare["tokens"]})).json()
        assert back == {"prompt": TEXTS[0]}
        body = {"messages": [{"role": "user", "content": "fox"}]}
        chat = (await client.post("/tokenize", json=body)).json()
        assert tokenizer.decode(chat["tokens"]) == "<|user|>fox</s><|assistant|>"
        body["add_generation_prompt"] = False
        chat = (await client.post("/tokenize", json=body)).json()
        assert tokenizer.decode(chat["tokens"]) == "<|user|>fox</s>"
        # As in vLLM a conversation has a vector, too.
        del body["add_generation_prompt"]
        found = [
            (await client.post("/v1/embeddings", json=asked)).json()
            for asked in (body, {"input": chat["tokens"]})
        ]
        assert found[0] == found[1] and len(found[0]["data"]) == 1
        body |= {"truncate_prompt_tokens": 2, "add_generation_prompt": True}
        found = (await client.post("/v1/embeddings", json=body)).json()
        assert found["usage"]["prompt_tokens"] == 2
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


MESSAGES = [{"role": "user", "content": "fox"}]
BAD = [
    ("/v1/embeddings", {}, "input", "must be text"),
    ("/v1/embeddings", {"messages": []}, "messages", "at least 1 item"),
    ("/v1/embeddings", {"messages": [{"role": 1}]}, "messages.0.role", "string"),
    ("/v1/embeddings", {"messages": MESSAGES, "input": "a"}, "input", "beside messages"),
    ("/v1/embeddings", {"messages": MESSAGES * 100}, "messages", "fewer than 129 tokens"),
    ("/v1/embeddings", {"messages": MESSAGES, "tools": [1]}, "tools.0", "dictionary"),
    ("/v1/embeddings", {"messages": MESSAGES * 2, "input": [1] * 10**5}, "input", "beside"),
    ("/v1/embeddings", {"input": ""}, None, None),  # has a start token
    ("/v1/embeddings", {"input": []}, "input", "at least one text"),
    ("/v1/embeddings", {"input": [[]]}, "input", "at least one token"),
    ("/v1/embeddings", {"input": ["a", 1]}, "input", "must be text"),
    ("/v1/embeddings", {"input": [True]}, "input", "must be text"),
    ("/v1/embeddings", {"input": {"a": 1}}, "input", "must be text"),
    ("/v1/embeddings", {"input": None}, "input", "must be text"),
    ("/v1/embeddings", {"input": [512]}, "input", "ids in [0, 512)"),
    ("/v1/embeddings", {"input": [-1]}, "input", "ids in [0, 512)"),
    ("/v1/embeddings", {"input": [3] * 129}, "input", "fewer than 129 tokens"),
    ("/v1/embeddings", {"input": ["a", "fox " * 150]}, "input", "fewer than 129 tokens"),
    ("/v1/embeddings", {"input": "a" * 3000}, "input", "at most 2048 characters"),
    ("/v1/embeddings", {"input": ["a"] * 100_000}, "input", "at most 2048 texts, got 100000"),
    ("/v1/embeddings", {"input": [[1]] * 100_000}, "input", "at most 2048 texts, got 100000"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions: "),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "at most 64"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1.5}, "dimensions", "dimensions: "),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
    (
        "/v1/embeddings",
        {"input": "a", "truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        "-1 or at least 1",
    ),
    ("/v1/embeddings", {"input": "a", "normalize": 1}, "normalize", "normalize: "),
    ("/rerank", {"query": "a"}, "body", "documents must be there"),
    ("/rerank", {"query": "a", "documents": ["a"], "texts": ["a"]}, "body", "got both"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "a list of texts, got none"),
    ("/rerank", {"query": "a", "documents": [1]}, "documents", "a list of texts, got int"),
    ("/rerank", {"query": "a", "documents": [{}]}, "documents", "a list of texts, got NoneType"),
    ("/rerank", {"query": "a", "documents": ["a"] * 3000}, "documents", "at most 2048 texts"),
    ("/rerank", {"query": ["a"], "documents": ["a"]}, "query", "query: "),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "top_n: "),
    ("/rerank", {"query": "a", "documents": ["fox " * 150]}, "documents", "fewer than 129"),
    ("/rerank", {"query": "fox " * 150, "documents": ["a"]}, "query", "fewer than 129"),
    ("/rerank", {"query": "a" * 3000, "texts": ["a"]}, "query", "at most 2048 characters"),
    ("/v1/score", {}, "text_1", "must be there"),
    ("/v1/score", {"text_1": "a"}, "text_2", "must be there"),
    ("/v1/score", {"documents": ["a"]}, "queries", "must be there"),
    ("/v1/score", {"queries": "a", "documents": "a", "items": "a"}, "items", "must not be there"),
    ("/v1/score", {"queries": "a", "documents": ["fox " * 150]}, "documents", "fewer than 129"),
    ("/v1/score", {"queries": "fox " * 150, "items": ["a"]}, "queries", "fewer than 129"),
    ("/v1/score", {"data_1": ["a"] * 2, "data_2": ["a"] * 3}, "data_2", "as many texts as data_1"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_2", "as many texts"),
    ("/v1/score", {"text_1": 5, "text_2": "a"}, "text_1", "text_1"),
    ("/tokenize", {}, "body", "prompt must be there"),
    ("/tokenize", {"prompt": 5}, "prompt", "prompt: "),
    ("/tokenize", {"prompt": "a" * 3000}, "prompt", "at most 2048 characters"),
    ("/tokenize", {"messages": []}, "messages", "messages: "),
    ("/detokenize", {"tokens": "a"}, "tokens", "a list of token ids, got str"),
    ("/detokenize", {"tokens": [True]}, "tokens", "a list of token ids"),
    ("/detokenize", {"tokens": [512]}, "tokens", "ids in [0, 512)"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "ids in [0, 512)"),
    ("/detokenize", {"tokens": [1] * 129}, "tokens", "fewer than 129"),
    ("/detokenize", {}, "tokens", "tokens: Field required"),
]


def test_what_is_refused(decoder, tokenizer):
    server = Serve(Engine(decoder[1], tokenizer, block_size=4, num_blocks=64))

    @server
    async def _(client):
        for path, body, field, message in BAD:
            response = await client.post(path, json=body)
            if field is None:
                assert response.status_code == 200, response.text
                continue
            assert response.status_code == 400, (path, body, response.text)
            error = response.json()["error"]
            assert response.status_code == error["code"] == 400, (path, body, error)
            assert error["param"] == field and message in error["message"], (body, error)
            assert len(response.text) < 1000
            text = json.dumps(body)[:-1] + ("," if body else "") + '"model": "other"}'
            assert (await client.post(path, content=text)).status_code == 400  # no content type
        for path in ("/v1/embeddings", "/rerank", "/v1/score", "/tokenize", "/detokenize"):
            body = {"input": "a", "query": "a", "documents": ["a"], "text_1": "a", "text_2": "a"}
            body |= {"tokens": [], "prompt": "a", "model": "other"}
            assert (await client.post(path, json=body)).status_code == 404
        assert server.worker.unfinished == 0
        assert server.worker.engine.stats().blocks_held == 0
        before = server.worker.engine.stats().prompt_tokens
        body = {"input": TEXTS, "dimensions": 65}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 400
        assert server.worker.engine.stats().prompt_tokens == before  # nothing was computed


def test_a_client_that_goes_away_frees_the_rest(tokenizer):
    """Of thousands of texts only those of one batch are in the queue."""

    async def main():
        engine = EncoderEngine(make("BertConfig", "BertModel"), tokenizer, max_num_seqs=4)
        server = Serve(engine)
        async with server.app.router.lifespan_context(server.app):
            transport = httpx.ASGITransport(server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                body = {"input": ["fox"] * 2000}
                task = asyncio.create_task(client.post("/v1/embeddings", json=body))
                while engine.stats().finished < 8:
                    assert server.worker.unfinished <= 4
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                while server.worker.unfinished:
                    await asyncio.sleep(0.005)
                assert engine.stats().finished < 2000

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_vector_that_is_not_finite_fails_alone(tokenizer):
    model = make("BertConfig", "BertModel")
    model.embeddings.word_embeddings.weight.data[300] = float("nan")
    server = Serve(EncoderEngine(model, tokenizer))

    @server
    async def _(client):
        bad = await client.post("/v1/embeddings", json={"input": [300]})
        assert bad.status_code == 500 and "must be finite" in bad.text
        assert (await client.post("/v1/embeddings", json={"input": [30]})).status_code == 200


# -- folders ------------------------------------------------------------------------------------------------------


def folder_of(path, config, **files):
    path.mkdir(exist_ok=True)
    for name, value in {"config": config, **files}.items():
        place = path / (name.replace("__", "/") + ".json")
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(value))
    return path


def modules(*kinds):
    return [{"path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"} for i, k in kinds]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "AutoModel"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "AutoModel"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, None),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
        (
            {"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta"},
            "AutoModelForSequenceClassification",
        ),
    ],
)
def test_which_folders_have_encoders(tmp_path, config, kind):
    assert encoder_class(folder_of(tmp_path, config)) == kind


def test_what_folders_say_of_pooling(tmp_path):
    from ipex_quant.util.safetensors import CheckpointError

    plain = folder_of(tmp_path / "a", {})
    assert read_pooling(plain, True) == PoolingConfig("mean", True)
    assert read_pooling(plain, False) == PoolingConfig("last", True)
    files = {"modules": modules((0, "Transformer"), (1, "Pooling"))}
    files |= {
        "1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    }
    files |= {"sentence_bert_config": {"max_seq_length": 128}}
    found = read_pooling(folder_of(tmp_path / "b", {}, **files), True)
    assert found == PoolingConfig("first", False, 128)
    files["modules"] += modules((2, "Normalize"))
    files["1_Pooling__config"] = {"pooling_mode": "lasttoken"}
    found = read_pooling(folder_of(tmp_path / "b", {}, **files), True)
    assert found == PoolingConfig("last", True, 128)
    config = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    assert not read_pooling(folder_of(tmp_path / "c", config), True).sigmoid
    for number, (config, files, message) in enumerate(
        (
            ({}, {"modules": modules((0, "Transformer"), (1, "Dense"))}, "got Dense"),
            ({}, {"modules": [{"path": "../x", "type": "a.Pooling"}]}, "inside of its own"),
            ({}, {"modules": {"a": 1}}, "list of modules"),
            (
                {},
                {"modules": modules((1, "Pooling")), "1_Pooling__config": {"pooling_mode": "max"}},
                "got max",
            ),
            ({"sentence_transformers": {"activation_fn": "os.system"}}, {}, "got system"),
        )
    ):
        with pytest.raises(CheckpointError, match=message):
            read_pooling(folder_of(tmp_path / f"d{number}", config, **files), True)


def test_the_vectors_of_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    make("BertConfig", "BertModel").save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None  # that library would use it
    tokenizer.save_pretrained(tmp_path)
    stock = models.Transformer(str(tmp_path), max_seq_length=64)
    whole = library.SentenceTransformer(
        modules=[stock, models.Pooling(32, "mean"), models.Normalize()], device="cpu"
    )
    expected = whole.encode(TEXTS, convert_to_tensor=True)
    whole.save(str(tmp_path / "saved"))
    found = read_pooling(tmp_path / "saved", True)
    assert found.pooling == "mean" and found.normalize
    from ipex_llm.entrypoints.cli.common import load_encoder

    kind = encoder_class(tmp_path / "saved")
    engine = EncoderEngine(load_encoder(tmp_path / "saved", kind, "fp32"), tokenizer)
    server = Serve(engine, found)

    @server
    async def _(client):
        data = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()["data"]
        got = torch.tensor([entry["embedding"] for entry in data])
        torch.testing.assert_close(got, expected.cpu(), rtol=1e-3, atol=1e-4)
