"""A stand-in for kvpress's python: speaks the bridge's protocol with the standard library alone.

    kvpress_fake.py HELPER.py        (arguments are ignored)

It greets as KVPRESS_FAKE_VERSION (0.5.5), and per KV head keeps the tokens that must stay and then the earliest. Round
AdaKVPress it keeps every other token instead, even ones in even heads and odd ones in odd heads. The option `say`
makes it misbehave: raise, die, garbage, silence, shape, float or more.
"""

import json
import os
import struct
import sys

SIZES = {"BOOL": 1, "F32": 4}


def unpacked(body):
    """Names to (dtype, shape, bytes) of a safetensors file."""
    (length,) = struct.unpack("<Q", body[:8])
    about, data = json.loads(body[8 : 8 + length]), body[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in about.items()
        if name != "__metadata__"
    }


def packed(name, dtype, shape, data):
    """A safetensors file of one tensor."""
    about = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(about)) + about + data


def send(header, body=b""):
    sys.stdout.buffer.write(json.dumps({**header, "bytes": len(body)}).encode() + b"\n" + body)
    sys.stdout.buffer.flush()


def kept(question, forced, heads, tokens):
    """One byte per head and token."""
    mask = bytearray(heads * tokens)
    for head in range(heads):
        row = range(head * tokens, (head + 1) * tokens)
        other = [at for at in row if (at - head) % 2 == 0] if question["press"][0] == "AdaKVPress" else list(row)
        stay = [at for at in row if forced[at]]
        chosen = stay + [at for at in other if not forced[at]]
        for at in chosen[: max(question["keep"], len(stay))]:
            mask[at] = 1
    return bytes(mask)


def reply(question, tensors):
    say = question["options"].get("say")
    _, (heads, tokens), forced = tensors["forced"]
    for name, (dtype, shape, data) in tensors.items():
        size = SIZES[dtype]
        for side in shape:
            size *= side
        if size != len(data):
            return send({"error": f"ValueError: {name} has {len(data)} bytes, {size} needed"})
    if say == "raise":
        return send({"error": "AssertionError: Query length 5 should be greater than the window size 64"})
    if say == "die":
        sys.exit("MemoryError: no more")
    if say == "garbage":
        sys.stdout.buffer.write(b"Loading weights: 100%\n")
        return sys.stdout.buffer.flush()
    if say == "silence":
        return send({})
    if say == "shape":
        return send({}, packed("keep", "BOOL", [heads, tokens - 1], bytes(heads * (tokens - 1))))
    if say == "float":
        return send({}, packed("keep", "F32", [heads, tokens], bytes(4 * heads * tokens)))
    if say == "more":
        return send({}, packed("keep", "BOOL", [heads, tokens], b"\1" * (heads * tokens)))
    return send({}, packed("keep", "BOOL", [heads, tokens], kept(question, forced, heads, tokens)))


def main():
    send({"kvpress": os.environ.get("KVPRESS_FAKE_VERSION", "0.5.5"), "torch": "none", "transformers": "none"})
    while line := sys.stdin.buffer.readline():
        question = json.loads(line)
        reply(question, unpacked(sys.stdin.buffer.read(question["bytes"])))


if __name__ == "__main__":
    main()
