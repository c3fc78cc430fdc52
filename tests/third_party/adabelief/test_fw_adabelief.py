"""AdaBelief passes what every optimizer plugin must."""

from fw_adabelief import AdaBelief

from fw import testing


class TestAdaBelief(testing.OptimizerSuite):
    plugin = AdaBelief
