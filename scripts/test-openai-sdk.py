"""What clients of the OpenAI API do, done with its SDK against a running waste-serve."""

import asyncio
import base64
import json
import subprocess
import sys
import threading
import time

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MODEL = "k3-tales"
USER = [{"role": "user", "content": "Once upon a time there was a king."}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
         for name in ("tide_table", "weather")]


def serve(*args, model=f"tests/models/{MODEL}"):
    command = [sys.argv[1], model, "--port", "0", "--json", "--ctx", "1024", *args]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, json.loads(server.stdout.readline())["addr"] + "/v1"


def small(**more):
    return {"model": MODEL, "messages": USER, "max_tokens": 16, "seed": 1, **more}


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    fails(openai.NotFoundError, lambda: client.models.retrieve("gpt-4"))


def test_chat(client):
    answer = client.chat.completions.create(**small())
    choice = answer.choices[0]
    assert choice.finish_reason in ("stop", "length") and answer.usage.total_tokens > 16
    assert choice.message.content or choice.message.reasoning_content
    again = client.chat.completions.create(**small())
    assert again.choices[0].message == choice.message
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_stream(client):
    chunks = list(client.chat.completions.create(**small(stream=True, stream_options={"include_usage": True})))
    assert chunks[-1].usage.completion_tokens == 16 and chunks[-1].choices == []
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    whole = client.chat.completions.create(**small(reasoning_effort="none"))
    with client.chat.completions.stream(**small(reasoning_effort="none")) as stream:
        events = [event.type for event in stream]
        # The SDK has no final completion of an answer that was cut.
        fails(openai.LengthFinishReasonError, stream.get_final_completion)
        snapshot = stream.current_completion_snapshot
    assert snapshot.choices[0].message.content == whole.choices[0].message.content
    assert "chunk" in events and "content.delta" in events


def test_cancel(client):
    stream = client.chat.completions.create(**small(max_tokens=800, stream=True))
    next(iter(stream))
    stream.close()
    start = time.time()
    client.chat.completions.create(**small(max_tokens=1))
    assert time.time() - start < 20


def test_tools(client):
    for choice, names in (("required", ("tide_table", "weather")),
                          ({"type": "function", "function": {"name": "weather"}}, ("weather",))):
        call = {**small(max_tokens=200), "tools": TOOLS, "tool_choice": choice, "reasoning_effort": "none"}
        message = client.chat.completions.create(**call).choices[0].message
        assert message.tool_calls[0].function.name in names, message
        with client.chat.completions.stream(**call) as stream:
            list(stream)
            assert stream.current_completion_snapshot.choices[0].message.tool_calls[0].function.name in names
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "a", "content": "rain"}]
    assert client.chat.completions.create(**{**small(tools=TOOLS), "messages": history}).choices
    none = client.chat.completions.create(**small(tools=TOOLS, tool_choice="none", parallel_tool_calls=False))
    assert not none.choices[0].message.tool_calls


def test_fields(client):
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert client.chat.completions.create(**small(reasoning_effort=effort, max_tokens=2)).choices
    more = {"top_k": 5, "min_p": 0.1, "thinking": {"type": "disabled"}}
    answer = client.chat.completions.create(**small(extra_body=more, logprobs=True, top_logprobs=2))
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert client.chat.completions.create(**small(response_format=format)).choices


class Creature(BaseModel):
    name: str
    age: int
    wild: bool


def test_parse(client):
    call = small(reasoning_effort="none", response_format=Creature, temperature=0.5)
    answer = client.chat.completions.parse(**{**call, "max_tokens": 400})
    assert isinstance(answer.choices[0].message.parsed, Creature)
    fails(openai.LengthFinishReasonError, lambda: client.chat.completions.parse(**{**call, "max_tokens": 3}))


def test_completions(client):
    text = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**text).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**text, stream=True)) == whole


def test_errors(client):
    fails(openai.BadRequestError, lambda: client.chat.completions.create(**small(temperature=3)))
    fails(openai.NotFoundError, lambda: client.chat.completions.create(**{**small(), "model": "gpt-4"}))
    fails(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))
    raw = client.chat.completions.with_raw_response.create(**small(max_tokens=1))
    assert raw.headers["x-request-id"]


def test_async(client):
    async def both():
        asynchronous = AsyncOpenAI(base_url=str(client.base_url), api_key="x")
        answers = await asyncio.gather(*(asynchronous.chat.completions.create(**small()) for _ in range(4)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1
    asyncio.run(both())


def test_keys_and_retries(_):
    server, url = serve("--api-key", "secret", "--queue", "0")
    try:
        fails(openai.AuthenticationError, lambda: OpenAI(base_url=url, api_key="x").models.list())
        client = OpenAI(base_url=url, api_key="secret", max_retries=0)
        done = []
        long = threading.Thread(target=lambda: done.append(client.chat.completions.create(**small(max_tokens=600))))
        long.start()
        time.sleep(0.5)
        fails(openai.RateLimitError, lambda: client.chat.completions.create(**small()))
        patient = OpenAI(base_url=url, api_key="secret", max_retries=20)
        assert patient.chat.completions.create(**small()).choices
        long.join()
        assert done
    finally:
        server.terminate()
        assert server.wait(60) == 0


def test_vision(_):
    server, url = serve("--vision", model="tests/interop/tiny-k3.waste")
    try:
        client = OpenAI(base_url=url, api_key="x")
        with open("tests/golden/tiny-k3/image.png", "rb") as file:
            data = "data:image/png;base64," + base64.b64encode(file.read()).decode()
        image = {"type": "image_url", "image_url": {"url": data, "detail": "high"}}
        ask = {"model": "tiny-k3", "max_tokens": 8, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]}
        answer = client.chat.completions.create(**ask)
        assert answer.usage.prompt_tokens > 6 and answer.choices[0].finish_reason in ("stop", "length")
        again = client.chat.completions.create(**ask)
        assert again.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens
        image["image_url"]["url"] = "https://example.com/x.png"
        fails(openai.BadRequestError, lambda: client.chat.completions.create(**ask))
    finally:
        server.terminate()
        assert server.wait(60) == 0


def fails(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def main():
    server, url = serve()
    client = OpenAI(base_url=url, api_key="x")
    tests = [(name, test) for name, test in globals().items() if name.startswith("test_")]
    wanted = [(name, test) for name, test in tests if all(word in name for word in sys.argv[2:])]
    try:
        for name, test in wanted:
            test(client)
            print(f"ok {name}", flush=True)
    finally:
        server.terminate()
    assert server.wait(60) == 0
    print(f"{len(wanted)} passed with openai {openai.__version__}")


main()
