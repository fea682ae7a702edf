-- job_submit.lua: an example of a site's own file, with slurm_jap's module loaded beside it.
--
-- Slurm has one job_submit.lua. A site that has one already takes the lines marked "jap" into its own. The module is
-- loaded guarded: without jap.lua, or with a broken one, Slurm works as if it had never been there.

local HERE = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/" -- jap
local loaded, jap = pcall(dofile, HERE .. "jap.lua") -- jap
if not loaded or type(jap) ~= "table" then -- jap
   slurm.log_error("%s", "jap: not in use: " .. tostring(jap)) -- jap
   jap = nil -- jap
end -- jap

function slurm_job_submit(job_desc, part_list, submit_uid)
   -- The site's own rules stand here: those that reject a job before the next line, those that set an account, a
   -- partition or a QOS too, so that coalescing sees what will be in force.
   if jap then -- jap
      pcall(jap.submit, job_desc, part_list, submit_uid) -- jap
   end -- jap
   return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
