// The path "neon-sdot": ARMv8 with FEAT_DotProd.
#define SOCFLOWER_INT8_NAMESPACE neon_sdot
#include "loops.inc"
#include "block_neon_sdot.h"

namespace socflower::int8 {

extern const Path kNeonSdotPath;
const Path kNeonSdotPath = neon_sdot::make_path("neon-sdot", neon_sdot::kSdotInt8, neon_sdot::kSdotInt8,
                                                neon_sdot::kWide);

}  // namespace socflower::int8
