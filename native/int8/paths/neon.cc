// The path "neon": ARMv8 without extensions.
#define SOCFLOWER_INT8_NAMESPACE neon
#include "loops.inc"
#include "block_neon.h"

namespace socflower::int8 {

extern const Path kNeonPath;
const Path kNeonPath = neon::make_path("neon", neon::kMullInt8, neon::kMullInt8, neon::kWide);

}  // namespace socflower::int8
