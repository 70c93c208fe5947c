"""Fast paths behind one dispatch. Each names the reference it must equal and when it applies."""

from .mode import mode as mode
from .short import short_applies as short_applies
from .short import short_attention as short_attention
from .unit import unit as unit
