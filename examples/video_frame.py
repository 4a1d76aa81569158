# %% [markdown]
"""# Recover a video frame from 50 sensors, none of which sees the image.

Each sensor holds 30 numbers: its own random mixtures of all 25,344 pixels of a frame. 1,500 numbers
in total do not determine a frame, unless it is a combination of few atoms: K-SVD learns 50 atoms
from the 80 previous frames, and FedGradMP finds which 3 of them the frame combines, and their
coefficients, while the measurements stay with the sensors.

    PARSIFL_DATA=folder python examples/video_frame.py

The directory needs video/carphone_pristine.mp4, which PyAV decodes (pip install 'parsifl[video]').
Without them the frames are generated moving shapes, and the output says so.
"""

# %%
from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import torch

import parsifl
from parsifl.linear.glm import GLM
from parsifl.linear.sparsity.dictionary import ksvd, omp
from parsifl_reproduction.fedgradmp.video import TARGET, frames, measure
from parsifl_reproduction.recipe import Context

PIECES, USED, ROUNDS = 50, 3, 40

# %% [markdown]
# ## Learn atoms from earlier frames

# %%
pixels, source = frames(Context())
learned = torch.from_numpy(pixels[:, : TARGET - 1].copy())
pieces = ksvd(learned, PIECES, USED, rounds=10, seed=0)
frame = pixels[:, TARGET]
print(f"frame {TARGET + 1} of {source}: {len(frame):,} pixels")

# %% [markdown]
# ## Measure, then recover
# The atoms are an orthonormal basis times a small matrix, so the problem has 50 columns
# instead of one per pixel.

# %%
basis, small = torch.linalg.qr(pieces)
sensors = measure(frame, basis, seed=0)
problem = GLM(PIECES, "squared-half", dictionary=small)
method = parsifl.get("fedgradmp", tau=USED, local_steps=1, batch_size=None)
run = parsifl.simulate(method, problem, sensors, ROUNDS, evaluate_every=0)
model = run.model
recovered = (pieces @ model.params["coef"]).numpy()

# %% [markdown]
# ## Evaluate the recovery
# The baseline is orthogonal matching pursuit on the frame itself.


# %%
def error(image: np.ndarray) -> float:
    """Return the relative error of an image."""
    return float(np.linalg.norm(image - frame) / np.linalg.norm(frame))


seen = (pieces @ omp(pieces, torch.from_numpy(frame)[:, None], USED))[:, 0].numpy()
print(f"measurements: {sensors.x.shape[0]:,} numbers at {len(sensors.train)} sensors")
print(f"relative error: {error(recovered):.3f}; with the frame in sight {error(seen):.3f}")
print(f"a constant image: {error(np.full_like(frame, frame.mean())):.3f}")
print(f"sent: {run.bytes_up:,} bytes up, {run.bytes_down:,} down, in {ROUNDS} rounds")


# %%
def save_png(path: Path, rows: np.ndarray) -> None:
    """Write a gray image with values in 0 .. 1."""
    gray = (255 * rows.clip(0, 1)).astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in gray)

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    head = struct.pack(">IIBBBBB", gray.shape[1], gray.shape[0], 8, 0, 0, 0, 0)
    body = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(body))


height = {25_344: 144, 6_336: 72}[len(frame)]
images = [frame, recovered, 0.5 + (recovered - frame)]
side_by_side = np.hstack([image.reshape(height, -1) for image in images])
save_png(Path("frame.png"), side_by_side)
print("frame.png shows the frame, what was recovered, and the difference")
