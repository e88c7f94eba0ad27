// SPDX-License-Identifier: Apache-2.0
// A folder of device binaries. Anything that is wrong with it costs time, never a result.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace ipex::xpu {

class BinaryCache {
 public:
  BinaryCache() = default;
  explicit BinaryCache(std::string directory) : directory_(std::move(directory)) {}

  // Name of the entry of a module for a driver.
  std::string key(const std::vector<std::byte>& module, const std::string& driver) const;
  // The entry, if there is one and its checksum agrees.
  std::optional<std::vector<unsigned char>> read(const std::string& key) const;
  // Writes an entry so that readers see all or nothing of it. False if it could not be written.
  bool write(const std::string& key, const std::vector<unsigned char>& binary) const;

 private:
  std::string directory_;
};

}  // namespace ipex::xpu
