"""The GPT-2 small and the ResNet-50 of `models.py` in torch, for `gpu.py`."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name)
from torch.profiler import ProfilerActivity, profile


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(h.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers=12, batch=8, length=1024, dim=768, heads=12, vocab=50257):
        super().__init__()
        self.batch = torch.randint(10, (batch, length + 1))
        self.token, self.position = nn.Embedding(vocab, dim), nn.Parameter(torch.zeros(length, dim))
        self.layers, self.norm = nn.Sequential(*(Layer(dim, heads) for _ in range(layers))), nn.LayerNorm(dim)

    def forward(self, tokens):
        x = self.layers(self.token(tokens[:, :-1]) + self.position)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Bottleneck(nn.Module):
    def __init__(self, n_in, n, stride):
        super().__init__()
        self.convs = nn.Sequential(conv(n_in, n, 1), nn.ReLU(), conv(n, n, 3, stride), nn.ReLU(), conv(n, 4 * n, 1))
        self.skip = conv(n_in, 4 * n, 1, stride) if n_in != 4 * n or stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.skip(x) + self.convs(x))


def conv(n_in, n_out, kernel, stride=1):
    layer = nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(n_out))


class ResNet(nn.Module):
    def __init__(self, batch=64, size=224, blocks=(3, 4, 6, 3), width=64, classes=1000):
        super().__init__()
        self.batch = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        stages, n_in = [conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stages.append(Bottleneck(n_in, width * 2**stage, 2 if stage > 0 and block == 0 else 1))
                n_in = 4 * width * 2**stage
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(n_in, classes)

    def forward(self, images):
        logits = self.head(self.stages(images).mean((2, 3)))
        return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.long, device=images.device))


CASES = {"gpt_case": GPT, "resnet_case": ResNet}


def train_step(case, sizes, dtype, compiled=False, mode=None):
    """Returns a function that runs a step, one that waits, one that says the peak bytes, and one that lists kernels."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    model = CASES[case](**sizes)
    batch = model.batch.to(device)
    model = model.to(device, memory_format=torch.channels_last) if case == "resnet_case" else model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=on_gpu)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    loss_of = torch.compile(model, mode=mode) if compiled else model

    def step():
        with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
            loss = loss_of(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def kernels(run):
        where, time = ("CUDA", "device_time_total") if on_gpu else ("CPU", "self_cpu_time_total")
        with profile(activities=[getattr(ProfilerActivity, where)]) as traced:
            run()
        yield from ((event.key, getattr(event, time) / 1e6) for event in traced.key_averages())

    step()  # compiles it
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    return step, wait, torch.cuda.max_memory_allocated if on_gpu else lambda: 0, kernels
