// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "runtime/scratch.h"

namespace ipex {

AttentionHandles::AttentionHandles(const char* name)
    : op(name),
      run(IPEX_KERNELS(name, attention)),
      pack(IPEX_KERNELS(name, attention_pack)),
      rows(IPEX_KERNELS(name, attention_rows)) {}

namespace {

// Packed heads that are made before they are used: more would leave the last-level cache.
constexpr int64_t kPackedAtOnce = int64_t{64} << 20;

template <class T>
void append(const Tensor& x, std::vector<float>& to) {
  const auto* values = static_cast<const T*>(x.const_data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to.push_back(static_cast<float>(values[i]));
}

std::vector<float> floats(const char* op, const char* name, const Tensor& x, const Tensor& query) {
  IPEX_CHECK(x.is_cpu(), op, ": ", name, " must be on the device of query = cpu");
  IPEX_CHECK(x.scalar_type() == query.scalar_type() || x.scalar_type() == ScalarType::Float, op,
             ": ", name, " must have the dtype of query = ", dtype_name(query.scalar_type()),
             " or float32, got ", dtype_name(x.scalar_type()));
  const Tensor values = as_contiguous(x);
  std::vector<float> result;
  result.reserve(static_cast<size_t>(x.numel()));
  if (x.scalar_type() == ScalarType::Float)
    append<float>(values, result);
  else if (x.scalar_type() == ScalarType::BFloat16)
    append<torch::headeronly::BFloat16>(values, result);
  else
    append<torch::headeronly::Half>(values, result);
  return result;
}

// All keys and values of one head with the queries that need them.
struct Task {
  int32_t sequence, kv_head;
  int64_t bytes;  // when packed
  int64_t cost;   // scores to compute
};

struct Planned {
  AttentionItem item;
  int64_t cost;
};

// Scores of `rows` queries that begin at `query`.
int64_t scores_of(const AttentionArgs& args, const AttentionSequence& sequence, int64_t query,
                  int64_t rows) {
  const KeyRange seen = visible(args, sequence.keys, sequence.shift, query, query + rows - 1);
  return rows * std::max<int64_t>(0, seen.end - seen.begin);
}

class Runner {
 public:
  Runner(const AttentionHandles& kernels, ScalarType dtype, AttentionArgs& args,
         std::vector<AttentionSequence>& sequences)
      : op_(kernels.op), args_(args), sequences_(sequences) {
    kernels.run.visit(dtype, [&]<class T>(auto* kernel) {
      run_ = kernel;
      element_ = sizeof(T);
    });
    kernels.pack.visit(dtype, [&]<class T>(auto* kernel) { pack_ = kernel; });
    kernels.rows.visit(dtype, [&]<class T>(auto* kernel) { rows_ = kernel(); });
    threads_ = std::max<int64_t>(1, static_cast<int64_t>(torch::stable::get_num_threads()));
    scratch_ = round_up(attention_scratch_bytes(args.size), 64);
    group_ = args.heads / args.kv_heads;
    args_.sequences = sequences.data();
  }

  void run() {
    make_tasks();
    if (tasks_.empty()) return;
    // With heads for every thread, a thread packs a head and uses it at once, while it is in its
    // cache. With fewer, all threads pack first and then share the queries.
    const auto count = static_cast<int64_t>(tasks_.size());
    if (threads_ == 1 || (count >= 4 * threads_ && tasks_.front().cost * threads_ <= cost_))
      run_by_task();
    else
      run_by_wave();
    IPEX_CHECK(!no_memory_, op_, ": not enough memory for the packed keys and values");
  }

 private:
  void make_tasks() {
    for (size_t i = 0; i < sequences_.size(); ++i) {
      AttentionSequence& s = sequences_[i];
      if (s.queries == 0) continue;
      const KeyRange seen = visible(args_, s.keys, s.shift, 0, s.queries - 1);
      s.begin = seen.begin / kKeyBlock * kKeyBlock;
      s.end = std::max(s.begin, seen.end);
      Task task{};
      task.sequence = static_cast<int32_t>(i);
      task.bytes = round_up(2 * packed_keys(s.end - s.begin, args_.size) * element_, 64);
      for (int64_t q = 0; q < s.queries; q += rows_)
        task.cost += group_ * (rows_ + scores_of(args_, s, q, std::min(rows_, s.queries - q)));
      for (int64_t h = 0; h < args_.kv_heads; ++h) {
        task.kv_head = static_cast<int32_t>(h);
        tasks_.push_back(task);
        cost_ += task.cost;
      }
    }
    std::stable_sort(tasks_.begin(), tasks_.end(),
                     [](const Task& a, const Task& b) { return a.cost > b.cost; });
  }

  // The items of a task, appended. A head with few queries shares an item with its neighbors.
  void add_items(const Task& task, int64_t rows, int64_t packed, std::vector<Planned>& to) const {
    const AttentionSequence& s = sequences_[static_cast<size_t>(task.sequence)];
    const int64_t together = std::min(group_, std::max<int64_t>(1, rows / s.queries));
    Planned planned{};
    AttentionItem& item = planned.item;
    item.sequence = task.sequence;
    item.packed = packed;
    for (int64_t h = 0; h < group_; h += together) {
      item.head = static_cast<int32_t>(task.kv_head * group_ + h);
      item.heads = static_cast<int32_t>(std::min(together, group_ - h));
      for (item.query = 0; item.query < s.queries; item.query += rows) {
        item.queries = static_cast<int32_t>(std::min(rows, s.queries - item.query));
        planned.cost = item.heads * scores_of(args_, s, item.query, item.queries);
        to.push_back(planned);
      }
    }
  }

  void add_packs(const Task& task, int64_t packed, std::vector<AttentionPack>& to) const {
    const AttentionSequence& s = sequences_[static_cast<size_t>(task.sequence)];
    for (int64_t first = s.begin; first < s.end; first += kKeyBlock)
      to.push_back({task.sequence, task.kv_head, first, packed});
  }

  // Calls f(i, memory of the thread) for i in [0, count), in this order, on so many threads as
  // `cost` (scores) is worth. Who is free takes the next: long ones should come first.
  template <class F>
  void share(int64_t count, int64_t cost, int64_t bytes, const F& f) {
    if (count == 0) return;
    // A thread should get some 60 thousand multiplications, or a region costs more than it brings.
    const int64_t worth = 1 + cost * args_.size / 60000;
    const int64_t workers = std::min({threads_, count, worth});
    const int64_t step = std::max<int64_t>(1, count / (workers * 32));
    std::atomic<int64_t> next{0};
    parallel_for(workers, 1, [&](int64_t, int64_t) {
      char* memory = Scratch<Area::kAttentionTask>::get(std::max<int64_t>(bytes, 64));
      if (!memory) {
        no_memory_ = true;
        return;
      }
      for (;;) {
        const int64_t begin = next.fetch_add(step, std::memory_order_relaxed);
        if (begin >= count) break;
        for (int64_t i = begin; i < std::min(begin + step, count); ++i) f(i, memory);
      }
    });
  }

  void run_by_task() {
    // Made beforehand: nothing may throw inside the loop.
    std::vector<Planned> planned;
    std::vector<AttentionPack> packs;
    std::vector<std::pair<size_t, size_t>> first{{0, 0}};
    int64_t bytes = 0;
    for (const Task& task : tasks_) {
      add_items(task, rows_, 0, planned);
      add_packs(task, 0, packs);
      first.emplace_back(planned.size(), packs.size());
      bytes = std::max(bytes, task.bytes);
    }
    const std::vector<AttentionItem> items = items_of(planned);
    share(static_cast<int64_t>(tasks_.size()), cost_, bytes + scratch_,
          [&](int64_t i, char* memory) {
            const auto [item, pack] = first[static_cast<size_t>(i)];
            const auto [item_end, pack_end] = first[static_cast<size_t>(i) + 1];
            pack_(&args_, packs.data() + pack, static_cast<int64_t>(pack_end - pack), memory);
            run_(&args_, items.data() + item, static_cast<int64_t>(item_end - item), memory,
                 memory + bytes);
          });
  }

  void run_by_wave() {
    int64_t rows = rows_;
    while (rows > 12 && items_with(rows) < 3 * threads_) rows /= 2;
    for (size_t task = 0; task < tasks_.size();) {
      std::vector<Planned> planned;
      std::vector<AttentionPack> packs;
      int64_t bytes = 0, cost = 0;
      do {
        add_items(tasks_[task], rows, bytes, planned);
        add_packs(tasks_[task], bytes, packs);
        bytes += tasks_[task].bytes;
        cost += tasks_[task].cost;
        ++task;
      } while (task < tasks_.size() && bytes + tasks_[task].bytes <= kPackedAtOnce);
      std::stable_sort(planned.begin(), planned.end(),
                       [](const Planned& a, const Planned& b) { return a.cost > b.cost; });
      const std::vector<AttentionItem> items = items_of(planned);
      char* packed = Scratch<Area::kAttentionCall>::get(std::max<int64_t>(bytes, 64));
      IPEX_CHECK(packed, op_, ": not enough memory for the packed keys and values");
      const auto n_packs = static_cast<int64_t>(packs.size());
      share(n_packs, n_packs * kKeyBlock, 0,
            [&](int64_t i, char*) { pack_(&args_, packs.data() + i, 1, packed); });
      share(static_cast<int64_t>(items.size()), cost, scratch_,
            [&](int64_t i, char* memory) { run_(&args_, items.data() + i, 1, packed, memory); });
    }
  }

  int64_t items_with(int64_t rows) const {
    int64_t count = 0;
    for (const Task& task : tasks_) {
      const int64_t queries = sequences_[static_cast<size_t>(task.sequence)].queries;
      const int64_t together = std::min(group_, std::max<int64_t>(1, rows / queries));
      count += (group_ + together - 1) / together * ((queries + rows - 1) / rows);
    }
    return count;
  }

  static std::vector<AttentionItem> items_of(const std::vector<Planned>& planned) {
    std::vector<AttentionItem> items;
    items.reserve(planned.size());
    for (const Planned& one : planned) items.push_back(one.item);
    return items;
  }

  const char* op_;
  AttentionArgs& args_;
  std::vector<AttentionSequence>& sequences_;
  decltype(ipex_k_attention_f32)* run_ = nullptr;
  decltype(ipex_k_attention_pack_f32)* pack_ = nullptr;
  int64_t rows_ = 0, threads_ = 1, scratch_ = 0, group_ = 1;
  int64_t element_ = 0;
  std::vector<Task> tasks_;
  int64_t cost_ = 0;
  std::atomic<bool> no_memory_{false};
};

}  // namespace

AttentionOptions attention_options(const char* op, const Tensor& query, int64_t sequences,
                                   int64_t heads, const OptionalTensor& alibi,
                                   const OptionalTensor& sinks, int64_t window_left,
                                   int64_t window_right, double softcap, bool is_causal,
                                   AttentionArgs& args) {
  AttentionOptions options;
  if (alibi) {
    options.alibi = floats(op, "alibi_slopes", *alibi, query);
    const bool one = alibi->dim() == 1 && alibi->size(0) == heads;
    IPEX_CHECK(one || (alibi->dim() == 2 && alibi->size(0) == sequences && alibi->size(1) == heads),
               op, ": alibi_slopes must have shape [", heads, "] or [", sequences, ", ", heads,
               "], got ", shape_text(*alibi));
    options.alibi_sequence = one ? 0 : heads;
  }
  if (sinks) {
    options.sinks = floats(op, "sinks", *sinks, query);
    IPEX_CHECK(sinks->dim() == 1 && sinks->size(0) == heads, op, ": sinks must have shape [", heads,
               "], got ", shape_text(*sinks));
    args.sinks = options.sinks.data();
  }
  IPEX_CHECK(std::isfinite(softcap), op, ": softcap must be a finite number, got ", softcap);
  const auto window = [](int64_t size) {
    return size < 0 ? kUnlimited : std::min(size, kUnlimited);
  };
  args.left = window(window_left);
  args.right = is_causal ? 0 : window(window_right);
  args.softcap = softcap > 0.0 ? static_cast<float>(softcap) : 0.0f;
  args.out_scale = 1.0f;
  return options;
}

void check_rows(const char* op, const Tensor& query, const Tensor& out) {
  check_tensor(op, "query", query);
  IPEX_CHECK(query.dim() == 3, op, ": query must be 3-D [tokens, heads, head_size], got ",
             query.dim(), "-D");
  check_like(op, "out", out, query, "query");
  check_not_expanded(op, "out", out);
  IPEX_CHECK(out.stride(2) == 1 || out.size(2) <= 1, op,
             ": out must have a contiguous last dimension, got stride ", out.stride(2));
}

void check_offset_tensor(const char* op, const char* name, const Tensor& offsets, int64_t size) {
  check_index_tensor(op, name, offsets, 1);
  IPEX_CHECK(offsets.size(0) >= 1, op, ": ", name, " must have size sequences + 1, got ",
             offsets.size(0));
  IPEX_CHECK(size == 0 || offsets.size(0) == size, op, ": ", name,
             " must have size sequences + 1 = ", size, ", got ", offsets.size(0));
}

void check_offsets(const char* op, const char* name, const Indices& offsets, int64_t count,
                   int64_t limit) {
  int64_t least = 0;
  for (int64_t i = 0; i < count; ++i) {
    IPEX_CHECK(offsets[i] >= least && offsets[i] <= limit, op, ": ", name,
               " must hold non-decreasing numbers in [0, ", limit, "], got ", offsets[i]);
    least = offsets[i];
  }
}

Tensor rows_contiguous(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) <= 1 ? x : torch::stable::contiguous(x);
}

void run_attention(const AttentionHandles& kernels, ScalarType dtype, AttentionArgs& args,
                   std::vector<AttentionSequence>& sequences) {
  Runner(kernels, dtype, args, sequences).run();
}

}  // namespace ipex
