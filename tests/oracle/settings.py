"""What the oracle asks for: codecs, rules, and the recipe text that says so.

`expected` states the rules of docs/recipes.md a second time, in Python, so that an artifact which is merely
consistent with its own config.json does not pass.
"""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Codec:
    mode: str
    bits: int
    group: int

    def toml(self):
        if self.mode == "affine":
            return f"{{ affine = {{ bits = {self.bits}, group = {self.group} }} }}"
        return json.dumps(self.mode)

    def entry(self):
        """The codec as mlx-lm writes it in config.json."""
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}


def affine(bits, group):
    return Codec("affine", bits, group)


MXFP4, MXFP8, NVFP4 = Codec("mxfp4", 4, 32), Codec("mxfp8", 8, 32), Codec("nvfp4", 4, 16)

# Small matrices that steer a layer; they get 8 bits unless a rule says otherwise.
STEERING = ("*.in_proj_a", "*.in_proj_b", "*.mlp.gate", "*.shared_expert_gate")


@dataclass(frozen=True)
class Setting:
    name: str
    default: Codec
    rules: tuple = ()  # (glob, Codec), first match wins

    def steering(self):
        return affine(8, self.default.group if self.default.mode == "affine" else 64)

    def expected(self, path):
        """The codec of the module at `path`."""
        for glob, codec in self.rules:
            if fnmatchcase(path, glob):
                return codec
        if any(fnmatchcase(path, glob) for glob in STEERING):
            return self.steering()
        return self.default

    def misfits(self, widths):
        """Modules whose input width (`widths`: path -> in_features) the codec's group does not divide."""
        return [path for path, width in widths.items() if width % self.expected(path).group]

    def fit(self, widths):
        """This setting with 32-wide groups for steering matrices that 64 does not divide, or None."""
        bad = self.misfits(widths)
        extra = tuple(
            (glob, affine(8, 32))
            for glob in STEERING
            if self.default.mode != "affine" and any(fnmatchcase(path, glob) for path in bad)
        )
        fitted = Setting(self.name, self.default, self.rules + extra)
        return None if fitted.misfits(widths) else fitted

    def toml(self):
        lines = [f'name = "oracle-{self.name}"', "", "[default]", f"codec = {self.default.toml()}"]
        lines.append('encoder = "mlx"')
        for glob, codec in self.rules:
            lines += ["", "[[rule]]", f"match = {json.dumps(glob)}", f"codec = {codec.toml()}"]
        return "\n".join(lines) + "\n"


MIXED = Setting("mixed-3-4-g32", affine(4, 32), (("*.mlp.*_proj", affine(3, 32)),))
MIXED_64 = Setting("mixed-3-4-g64", affine(4, 64), (("*.mlp.*_proj", affine(3, 64)),))
TWO_MODES = Setting("nvfp4-mlp-affine6", affine(6, 32), (("*.mlp.*_proj", NVFP4),))

SMALL = (
    Setting("affine4-g32", affine(4, 32)),
    Setting("affine4-g64", affine(4, 64)),
    Setting("affine4-g128", affine(4, 128)),
    MIXED,
    TWO_MODES,
    *(Setting(f"affine{bits}-g32", affine(bits, 32)) for bits in (2, 3, 5, 6, 8)),
    Setting("mxfp4", MXFP4),
    Setting("mxfp8", MXFP8),
    Setting("nvfp4", NVFP4),
)
# For models of 30 million parameters and more, where the fp encoders of mlx take seconds.
LARGE = (Setting("affine4-g64", affine(4, 64)), MIXED_64, Setting("mxfp8", MXFP8))
