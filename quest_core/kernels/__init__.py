"""Fast paths behind one dispatch. Each names the reference it must equal and when it applies."""

from .mode import mode as mode
from .short import short_applies as short_applies
from .short import short_attention as short_attention
from .unit import unit as unit
from .unit_layer import is_hooked as is_hooked
from .unit_layer import unit_layer as unit_layer
from .unit_layer import unit_layer_parameters as unit_layer_parameters
from .unit_logits import are_ordinary as are_ordinary
from .unit_logits import unit_attention as unit_attention
from .unit_logits import unit_attention_with_logits as unit_attention_with_logits
from .unit_logits import unit_logits as unit_logits
from .unit_logits import unit_logits_applies as unit_logits_applies
